"""How errors and warnings of Python become sentences of the command."""

from __future__ import annotations

import ast
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from calipers import errors
from calipers.calibration.coverage import no_tokens
from calipers.cli import main
from calipers.cli.app import OUR_BUG, CommandOutput, add_to, app
from calipers.cli.main import INTERRUPTED
from calipers.cli.options import FLAGS, as_typed
from calipers.errors import ANY, CalipersWarning, Call, Option


@pytest.mark.parametrize(
    ("term", "python", "typed"),
    [
        (Option("overwrite", True), "overwrite=True", "--overwrite"),
        (Option("share_inputs", False), "share_inputs=False", "--no-share-inputs"),
        (Option("on_unseen", "peers"), "on_unseen='peers'", "--on-unseen peers"),
        (Option("text_column", ANY), "text_column=…", "--text-column …"),
        (Option("max_seq_length", 4096), "max_seq_length=4096", "--seq-len 4096"),
        (Option("dataset"), "dataset", "--data"),
        (Option("dtype", None), "dtype=None", "--dtype None"),
        (Option("weight_observer", owner="Modifier"), "Modifier.weight_observer", "--observer"),
        (Option("input_observer", owner="Modifier"), "Modifier.input_observer", None),
        (Option("padding_side", "top"), "padding_side='top'", None),
        (Call("plan.table"), "plan.table()", "calipers plan"),
        (Call("observer.reset"), "observer.reset()", None),
    ],
)
def test_options_are_spelt_as_they_are_typed(
    term: Option | Call, python: str, typed: str | None
) -> None:
    assert (str(term), as_typed(term)) == (python, typed or python)


def test_every_option_that_messages_name_can_be_typed() -> None:
    """What is not an option of a command is listed here, lest one is forgotten."""
    source = Path(errors.__file__).parent.parent
    texts = (path.read_text() for path in source.rglob("*.py"))
    calls = (node for text in texts for node in ast.walk(ast.parse(text)))
    named = {
        node.args[0].value
        for node in calls
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", None) in ("Option", "not_allowed", "no_meaning")
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert {"overwrite", "dataset", "num_samples", "on_unseen"} <= named
    untyped = {name for name in named if as_typed(Option(name)) == name}
    assert untyped == {"padding_side", "rank"}


def test_every_option_that_can_be_typed_exists() -> None:
    commands: Any = typer.main.get_command(app)
    named = [commands.get_command(None, name) for name in commands.list_commands(None)]
    parameters = [each for command in named for each in command.params]
    known = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts)}
    assert set(FLAGS.values()) - known == set()
    switches = {flag for each in parameters for flag in each.secondary_opts}
    assert {"--no-packing", "--no-share-inputs", "--no-layers"} <= switches


def invoke(error: BaseException | None, *arguments: str) -> Result:
    """Run a command that warns and then fails."""

    def work() -> CommandOutput:
        """Work.

        Example: work
        """
        hint = "Give more data: " + Option("num_calibration_samples", 512) + "."
        warnings.warn(CalipersWarning("It is little", hint=hint), stacklevel=2)
        warnings.warn("of a library", UserWarning, stacklevel=2)
        if error is not None:
            raise error
        return CommandOutput({"done": "✓ [1]"}, "done")

    app = typer.Typer()
    add_to(app, work)
    return CliRunner().invoke(app, arguments)


def test_success() -> None:
    done = invoke(None)
    assert (done.exit_code, done.stdout) == (0, "done\n")
    assert done.stderr == "Warning: It is little. Give more data: --samples 512.\n"
    done = invoke(None, "--json")
    assert json.loads(done.stdout) == {"done": "✓ [1]"}
    assert json.loads(done.stderr) == {"warning": "It is little. Give more data: --samples 512."}


def test_an_error_of_the_user() -> None:
    done = invoke(no_tokens(["a.b"], "error"))
    assert (done.exit_code, done.stdout) == (4, "")
    assert "Error: 1 module saw no tokens: a.b." in done.stderr
    assert "--on-unseen weights_only" in done.stderr
    done = invoke(no_tokens(["a.b"], "error"), "--json")
    told = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (told["type"], told["exit_code"]) == ("UnseenModulesError", 4)
    assert told["context"]["what"] == "1 module saw no tokens: a.b"
    assert told["context"]["hint"].startswith("Give more or other data, show all tokens to all")
    assert "--on-unseen peers" in told["context"]["hint"]
    assert {"what", "hint"} == told["context"].keys()


def test_an_error_of_ours() -> None:
    done = invoke(ZeroDivisionError("division by zero"))
    assert done.exit_code == 70
    assert done.stderr.endswith(
        "Error: ZeroDivisionError: division by zero. This looks like a bug of Calipers; --debug "
        "shows more.\n"
    )
    assert "Traceback" not in done.stderr
    debugged = invoke(ZeroDivisionError("division by zero"), "--debug")
    assert debugged.exit_code == 70
    assert "Traceback" in debugged.stderr


def test_interrupts_however_libraries_wrap_them() -> None:
    assert invoke(KeyboardInterrupt()).exit_code == 130
    wrapped = ImportError("cannot import name 'x'")
    wrapped.__context__ = RuntimeError("while loading")
    wrapped.__context__.__cause__ = KeyboardInterrupt()
    assert invoke(wrapped).exit_code == 130


def test_the_documents_have_every_exit_code() -> None:
    readme = (Path(main.__file__).parent / "README.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d+) \| ", readme, re.MULTILINE)}
    ours = {kind.exit_code for kind in vars(errors).values() if hasattr(kind, "exit_code")}
    assert listed == ours | {0, OUR_BUG, INTERRUPTED}


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert invoke(None).stdout == ""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert invoke(None).stdout != ""


def test_an_observer_is_an_option_unless_a_file_names_it() -> None:
    key = "QuantizationModifier.weight_observer"
    typed = errors.code_not_allowed("a.py:A", key).spelt(as_typed)
    assert typed.startswith("--observer: 'a.py:A' is Python code, which was not run")
    assert typed.endswith("If you trust the file 'a.py', pass --allow-code.")
    in_file = errors.code_not_allowed("a.py:A", key, source="r.yaml", line=2)
    assert in_file.spelt(as_typed).startswith(f"r.yaml, line 2: {key}: 'a.py:A' is Python code")
