"""Colours and progress bars are for terminals that can show them, and for nobody else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from shell import Terminal

ESCAPE = "\x1b["
WRONG = ("plan", "m.pt", "--scheme", "W4A16")


def on_terminal(*arguments: str, cwd: Path, env: dict[str, str]) -> str:
    """Run the command in a terminal, and return all that it shows."""
    with Terminal(*arguments, cwd=cwd, env=env) as terminal:
        return terminal.read_until(None)


def test_errors_are_red_where_there_are_colours(tmp_path: Path) -> None:
    (tmp_path / "m.pt").touch()
    shown = on_terminal(*WRONG, cwd=tmp_path, env={})
    assert shown.startswith(f"{ESCAPE}1;31mError: {ESCAPE}0mThe weights of 'm.pt' are pickles")


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_no_colours_where_there_are_none(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "m.pt").touch()
    shown = on_terminal(*WRONG, cwd=tmp_path, env=env)
    assert shown.startswith("Error: The weights of 'm.pt' are pickles")
    assert ESCAPE not in shown


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=str)
def test_a_person_sees_how_far_it_is(
    env: dict[str, str], model: Path, text: Path, tmp_path: Path
) -> None:
    arguments = ("--scheme", "FP8", "--data", str(text), "--samples", "80", "--seq-len", "64")
    shown = on_terminal("quantize", str(model), *arguments, "-o", "out", cwd=tmp_path, env=env)
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    assert "Written to out: 658 kB → 363 kB" in plain
    assert (ESCAPE in shown) == (not env)
    assert ("calibrating" in shown) == (not env)
    assert ("5120/5120 tokens" in shown) == (not env)
    for phase in ("loading the model", "choosing scales", "writing the checkpoint"):
        assert (phase in plain) == (not env)
    assert (re.search(r"\d MB [\d.,]+ MB/s", plain) is not None) == (not env)


def test_bars_fit_into_narrow_terminals(model: Path, text: Path, tmp_path: Path) -> None:
    arguments = ("--scheme", "FP8", "--data", str(text), "--samples", "80", "--seq-len", "64")
    env = {"COLUMNS": "80"}
    shown = on_terminal("quantize", str(model), *arguments, "-o", "out", cwd=tmp_path, env=env)
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    assert any("5120/5120 tokens" in line for line in lines)
    assert max(map(len, lines)) <= 80
