"""What a person who does not know the command meets first."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from shell import environment, run
from tracing import SOURCE

from calipers import __version__
from calipers.options import OutputOptions

COMMANDS = (
    *("quantize", "plan", "evaluate", "lint", "report", "measure", "merge", "show", "advise"),
    *("observers", "schemes", "doctor", "demo"),
)
HEAVY = {"torch", "transformers", "compressed_tensors", "huggingface_hub", "rich", "numpy", "yaml"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_the_common_options(command: str) -> None:
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Example:\n    calipers {command}" in done.stdout
    assert "--json" in done.stdout
    assert "--debug" in done.stdout


def test_help_names_all_commands_and_the_exit_codes() -> None:
    done = run("-h")
    assert done.returncode == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.stdout
    assert "Exit codes: 0 done, 2 wrong input" in done.stdout
    bare = run()
    assert bare.returncode == 2
    assert "Commands:" in bare.stdout + bare.stderr


def test_the_version() -> None:
    assert run("--version").stdout == f"calipers {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [(["--help"], {*HEAVY, "pydantic"}), (["quantize", "--help"], HEAVY)],
)
def test_help_imports_nothing_heavy(arguments: list[str], heavy: set[str]) -> None:
    script = (
        "import sys, runpy\n"
        f"sys.argv[1:] = {arguments}\n"
        "try: runpy.run_module('calipers.cli.main', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        f"print(sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.stderr == "[]\n"
    assert "Usage: calipers" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["quantise"], "No such command 'quantise'. Did you mean 'quantize'?"),
        (["plan", "demo", "--shceme", "W4A16"], "No such option: --shceme"),
        (["quantize", "demo", "--scheme", "W4A16"], "Missing option '--output' / '-o'."),
        (["plan"], "Missing argument 'MODEL'."),
    ],
)
def test_misspelt_and_missing_words(arguments: list[str], text: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr
    assert "for help" in done.stderr
    assert "Traceback" not in done.stderr
    if "--shceme" in text:
        assert "--scheme" in done.stderr


@pytest.mark.parametrize("command", ["quantize", "measure", "merge", "report", "advise", "demo"])
def test_where_results_go_is_declared_once(command: str) -> None:
    flags = OutputOptions.flags()
    text = run(command, "--help").stdout
    long, short = flags["output_dir"]
    assert re.search(rf"{short}, {long}\s+F(ILE|OLDER)", text)
    assert (flags["overwrite"][0] in text) is (command != "demo")
    sources = [file.read_text(encoding="utf-8") for file in SOURCE.glob("cli/*.py")]
    assert not any(f'"{flag[0]}"' in code for code in sources for flag in flags.values())
