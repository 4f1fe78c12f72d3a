"""``calipers lint``: what people and machines are told, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from linting import checkpoint, damaged, sources, with_value
from safetensors.torch import load_file
from shell import refused, run

NAME = "model.layers.0.self_attn.q_proj.weight_scale"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lint")


def test_a_sound_checkpoint(place: Path) -> None:
    done = run("lint", str(checkpoint(place, "W4A16")), "--strict")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "Nothing found. 49 tensors read, 14 weights are quantized.\n"


def test_errors_of_weights_are_shown(place: Path) -> None:
    folder, source = checkpoint(place, "W4A16"), sources(place, "W4A16")
    done = run("lint", str(folder), "--against", str(source))
    assert done.returncode == 0
    (row,) = (line for line in done.stdout.splitlines() if "self_attn.q_proj" in line)
    assert row.split()[:5] == ["model.layers.{0..1}.self_attn.q_proj", "×2", "int4", "group", "128"]
    assert "11." in row


def test_alike_findings_are_one_for_people_and_all_for_machines(
    place: Path, tmp_path: Path
) -> None:
    sound = checkpoint(place, "W4A16")
    scales = [n for n in load_file(sound / "model.safetensors") if n.endswith("_scale")]
    folder = damaged(sound, tmp_path, dict.fromkeys(scales, with_value(0)))
    done = run("lint", str(folder))
    assert done.returncode == 1
    assert done.stdout.startswith("error: scale-zero\n")
    assert done.stdout.count(" values that are zero.\n") == 3
    assert "… and 11 more, 14 in all." in done.stdout
    assert "14 errors." in done.stdout
    told = json.loads(run("lint", str(folder), "--json").stdout)
    assert sorted(each["name"] for each in told["findings"]) == sorted(scales)
    assert {each["check"] for each in told["findings"]} == {"scale-zero"}
    assert told["counts"] == {"error": 14, "warning": 0, "note": 0}


def test_warnings_fail_if_so_wanted(place: Path, tmp_path: Path) -> None:
    folder = damaged(checkpoint(place, "W4A16"), tmp_path, {NAME: with_value(1e-39)})
    assert run("lint", str(folder)).returncode == 0
    done = run("lint", str(folder), "--strict")
    assert done.returncode == 1
    assert done.stdout.startswith("warning: scale-denormal\n")


def test_what_is_no_quantized_checkpoint(place: Path, tmp_path: Path) -> None:
    source = sources(place, "W4A16")
    refused(["lint", "nowhere"], "no such folder", cwd=tmp_path)
    refused(["lint", source], "is not quantized: its config has no", cwd=tmp_path)
    folder = damaged(checkpoint(place, "W4A16"), tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(["lint", folder], "is damaged or incomplete", cwd=tmp_path)
