"""How errors and warnings of Python become sentences of the command."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from calipers import errors
from calipers.cli import INTERRUPTED, command
from calipers.cli.command import OUR_BUG, Report, add_to, as_options
from calipers.errors import CalipersWarning, UnseenModulesError


@pytest.mark.parametrize(
    ("python", "spelt"),
    [
        ("Pass overwrite=True to replace it.", "Pass --overwrite to replace it."),
        ('pass on_unseen="weights_only".', "pass --on-unseen weights_only."),
        ("Name it with text_column=...", "Name it with --text-column ..."),
        ("Use batch_size=1 or pack the data", "Use --batch-size 1 or pack the data"),
        ("max_seq_length=4096 is not allowed", "--seq-len 4096 is not allowed"),
        ("Pass share_inputs=False to", "Pass --no-share-inputs to"),
        ("no dataset was given. Pass dataset=…,", "there is no --data. Pass --data …,"),
        ("max_shard_size='5 apples' is no size", "--max-shard-size 5 apples is no size"),
        ("from_pretrained(…, dtype=torch.bfloat16)", "from_pretrained(…, dtype=torch.bfloat16)"),
        (
            "r.yaml: QuantizationModifier.weight_observer",
            "r.yaml: QuantizationModifier.weight_observer",
        ),
    ],
)
def test_arguments_are_spelt_as_options(python: str, spelt: str) -> None:
    assert as_options(python) == spelt


def invoke(error: BaseException | None, *arguments: str) -> Result:
    """Run a command that warns and then fails."""

    def work() -> Report:
        """Work.

        Example: work
        """
        warnings.warn("Give more data: num_calibration_samples=512.", CalipersWarning, stacklevel=2)
        warnings.warn("of a library", UserWarning, stacklevel=2)
        if error is not None:
            raise error
        return Report({"done": "✓ [1]"}, "done")

    app = typer.Typer()
    add_to(app, work)
    return CliRunner().invoke(app, arguments)


def test_success() -> None:
    done = invoke(None)
    assert (done.exit_code, done.stdout) == (0, "done\n")
    assert done.stderr == "Warning: Give more data: --samples 512.\n"
    done = invoke(None, "--json")
    assert json.loads(done.stdout) == {"done": "✓ [1]"}
    assert json.loads(done.stderr) == {"warning": "Give more data: --samples 512."}


def test_an_error_of_the_user() -> None:
    done = invoke(UnseenModulesError(["a.b"], "error"))
    assert (done.exit_code, done.stdout) == (4, "")
    assert "Error: 1 module saw no tokens: a.b." in done.stderr
    assert "--on-unseen weights_only" in done.stderr
    done = invoke(UnseenModulesError(["a.b"], "error"), "--json")
    told = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (told["type"], told["exit_code"]) == ("UnseenModulesError", 4)


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
    readme = (Path(command.__file__).parent / "README.md").read_text()
    listed = {int(code) for code in re.findall(r"^\| (\d+) \| ", readme, re.MULTILINE)}
    kinds = (getattr(errors, name) for name in errors.__all__)
    ours = {kind.exit_code for kind in kinds if hasattr(kind, "exit_code")}
    assert listed == ours | {0, OUR_BUG, INTERRUPTED}


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert invoke(None).stdout == ""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert invoke(None).stdout != ""
