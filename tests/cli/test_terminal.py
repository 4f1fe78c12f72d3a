"""Colours and progress bars are for terminals that can show them, and for nobody else."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from shell import Terminal, run

ESCAPE = "\x1b["
WRONG = ("plan", "m.pt", "--scheme", "W4A16")


def on_terminal(*arguments: str, cwd: Path, env: dict[str, str]) -> str:
    """Run the command in a terminal, and return all that it shows."""
    with Terminal(*arguments, cwd=cwd, env=env) as terminal:
        return terminal.read_until(None)


@pytest.mark.slow
def test_errors_are_red_where_there_are_colours(tmp_path: Path) -> None:
    (tmp_path / "m.pt").touch()
    shown = on_terminal(*WRONG, cwd=tmp_path, env={})
    assert shown.startswith(f"{ESCAPE}1;31mError: {ESCAPE}0mThe weights of 'm.pt' are pickles")


@pytest.mark.slow
def test_no_colours_where_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "m.pt").touch()
    shown = on_terminal(*WRONG, cwd=tmp_path, env={"TERM": "dumb"})
    assert shown.startswith("Error: The weights of 'm.pt' are pickles")
    assert ESCAPE not in shown


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=str)
@pytest.mark.slow
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


@pytest.mark.slow
def test_bars_fit_into_narrow_terminals(model: Path, text: Path, tmp_path: Path) -> None:
    arguments = ("--scheme", "FP8", "--data", str(text), "--samples", "80", "--seq-len", "64")
    env = {"COLUMNS": "80"}
    shown = on_terminal("quantize", str(model), *arguments, "-o", "out", cwd=tmp_path, env=env)
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", plain)]
    assert any("5120/5120 tokens" in line for line in lines)
    assert max(map(len, lines)) <= 80


EVIL = "ev\x1b]0;title\x07\x9b2J\x7f\r\u202eil [red]:x: [/]"
"""Sets the title, clears the screen, turns the direction of writing, and is markup for rich."""


@pytest.fixture(scope="module")
def hostile(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and with a checkpoint of it in which all names are hostile."""
    place = tmp_path_factory.mktemp("hostile")
    shutil.copytree(model, place / f"model {EVIL}")
    done = run("quantize", f"model {EVIL}", "-s", "W4A16", "-o", EVIL, cwd=place)
    assert done.returncode == 0, done.stderr
    shutil.copytree(place / EVIL, place / f"damaged {EVIL}")
    folder = place / f"damaged {EVIL}"
    found = load_file(folder / "model.safetensors")
    found[f"model.layers.0.{EVIL}.weight_packed"] = torch.zeros(8, 16, dtype=torch.int32)
    found[f"model.layers.0.{EVIL}.weight_scale"] = torch.zeros(8, 1)
    found[f"{EVIL}.bias"] = torch.full((4,), torch.nan)
    save_file(found, folder / "model.safetensors")
    notes = json.loads((folder / "calipers.json").read_text())
    notes["weight_errors"][EVIL] = 1.0
    (folder / "calipers.json").write_text(json.dumps(notes))
    return place


@pytest.mark.parametrize("more", [(), ("--json",)], ids=str)
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("lint", f"damaged {EVIL}"), 1),
        (("lint", f"damaged {EVIL}", "--against", f"model {EVIL}"), 1),
        (("report", f"damaged {EVIL}", "--overwrite", "-o", f"{EVIL}.html"), 0),
        (("plan", f"model {EVIL}", "-s", "W4A16"), 0),
        (("plan", f"model {EVIL}", "-s", EVIL), 2),
        (("plan", f"model {EVIL}", f"--{EVIL}"), 2),
        (("show", f"damaged {EVIL}"), 0),
        (("show", EVIL, "--debug", EVIL), 2),
        (("lint", f"nowhere {EVIL}", "--debug"), 2),
        ((EVIL,), 2),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_names_do_not_steer_the_terminal(
    arguments: tuple[str, ...], code: int, more: tuple[str, ...], hostile: Path
) -> None:
    """Neither those of folders and files nor those in them, whoever prints them."""
    done = run(*arguments, *more, cwd=hostile)
    assert done.returncode == code, done.stderr
    shown = done.stdout + done.stderr
    assert [each for each in shown if not each.isprintable() and each != "\n"] == []
    if arguments[0] != "plan" or code:
        assert "il [red]:x: [/]" in shown
    if more and code < 2:
        assert json.dumps(EVIL)[1:-1] in json.dumps(json.loads(done.stdout))


@pytest.mark.slow
def test_names_do_not_steer_bars(hostile: Path, text: Path) -> None:
    size = ("--data", str(text), "--samples", "24", "--seq-len", "16")
    arguments = ("evaluate", f"model {EVIL}", EVIL, f"./{EVIL}", *size)
    shown = on_terminal(*arguments, cwd=hostile, env={})
    plain = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", shown)
    assert re.search(r"evaluating \S*ev�[^\r\n]*il \[red\]:x: \[/\]", plain)
    assert [each for each in plain if not each.isprintable() and each not in "\r\n"] == []
