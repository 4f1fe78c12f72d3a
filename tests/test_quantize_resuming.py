"""A run that was killed goes on: finished files are kept, and the checkpoint is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from quantizing import IDS, model_folder, modifier
from shell import PROGRAM, environment, run

import calipers
from calipers.checkpoint.output import NAME, Journal
from calipers.engine.loop import StepDriver

SIZE = "60KB"
RECIPE = modifier("NVFP4A16", weight_observer="memoryless_mse")


class Killed(BaseException):
    """Nothing that anybody expects."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model") / "model", num_hidden_layers=3)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(quantize(model, tmp_path_factory.mktemp("whole") / "out"))


def quantize(model: Path, out: Path, recipe: Any = RECIPE, **options: Any) -> Path:
    options = {"max_shard_size": SIZE, "progress": False, **options}
    return calipers.quantize(model, recipe, output_dir=out, **options).output_dir


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def killed_after(
    shards: int, model: Path, out: Path, error: BaseException, recipe: Any = RECIPE, **options: Any
) -> None:
    """Quantize until so many files are finished."""
    add = Journal.add

    def adding(self: Journal, *arguments: Any) -> None:
        add(self, *arguments)
        if len(self.shards) == shards:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "add", adding)
        with pytest.raises(type(error), match=str(error.args[-1])):
            quantize(model, out, recipe, **options)


def solved_by(model: Path, out: Path) -> list[str]:
    """Quantize, and return the modules that were solved for it."""
    solved: list[str] = []
    solve = StepDriver.solve

    def solving(self: StepDriver, names: tuple[str, ...]) -> Any:
        solved.extend(names)
        return solve(self, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepDriver, "solve", solving)
        quantize(model, out)
    return solved


def unfinished(out: Path) -> Path:
    return out.parent / f".{out.name}.calipers"


@pytest.mark.parametrize(("shards", "least"), [(2, 1), (5, 1), (7, 0)])
def test_it_goes_on_behind_what_is_finished(
    model: Path, whole: dict[str, bytes], tmp_path: Path, shards: int, least: int
) -> None:
    out = tmp_path / "out"
    killed_after(shards, model, out, Killed("by nobody"))
    assert not out.exists()
    kept = {path.name: path.stat().st_ino for path in (unfinished(out) / "new").iterdir()}
    assert len([name for name in kept if name.startswith("model-")]) >= shards
    quantize(model, tmp_path / "neighbour")  # puts right what others left, and leaves this alone
    assert least <= len(solved_by(model, out)) < 21
    assert files_of(out) == whole
    assert {path.stat().st_ino for path in out.iterdir()} & set(kept.values())
    assert sorted(os.listdir(tmp_path)) == ["neighbour", "out"]


def test_another_way_begins_anew(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_after(3, model, out, Killed("by nobody"))
    other = calipers.quantize(model, "FP8_DYNAMIC", output_dir=out, progress=False)
    assert os.listdir(tmp_path) == ["out"]
    clean = calipers.quantize(model, "FP8_DYNAMIC", output_dir=tmp_path / "clean", progress=False)
    assert files_of(other.output_dir) == files_of(clean.output_dir)
    killed_after(3, model, tmp_path / "second", Killed("by nobody"))
    first = next((unfinished(tmp_path / "second") / "new").glob("model-00001*"))
    first.write_bytes(first.read_bytes()[:-8])
    assert len(solved_by(model, tmp_path / "second")) == 21
    assert files_of(tmp_path / "second") == whole


@pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")
def test_other_measurements_begin_anew(model: Path, tmp_path: Path) -> None:
    first, second = (calipers.measure(model, ids, progress=False) for ids in (IDS[:3], IDS[3:]))
    recipe = modifier("W8A8_STATIC")
    killed_after(3, model, tmp_path / "out", Killed("by nobody"), recipe, measurements=first)
    quantize(model, tmp_path / "out", recipe, measurements=second)
    quantize(model, tmp_path / "clean", recipe, measurements=second)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "clean")


def test_an_error_leaves_nothing(model: Path, tmp_path: Path) -> None:
    killed_after(2, model, tmp_path / "out", OSError(28, "No space left on device"))
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_killed_process(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", num_hidden_layers=24)
    out = tmp_path / "out"
    arguments = ["quantize", str(model), "--scheme", "NVFP4A16", "-o", str(out)]
    arguments += ["--observer", "nvfp4_expanded_mse", "--max-shard-size", SIZE]
    process = subprocess.Popen([*PROGRAM, *arguments], env=environment())
    while not (unfinished(out) / NAME).exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    done = run(*arguments)
    assert done.returncode == 0, done
    direct = calipers.quantize(
        model,
        modifier("NVFP4A16", weight_observer="nvfp4_expanded_mse", ignore=["lm_head"]),
        output_dir=tmp_path / "direct",
        max_shard_size=SIZE,
        progress=False,
    )
    ours, theirs = files_of(out), files_of(direct.output_dir)
    assert {name for name in ours if ours[name] != theirs[name]} <= {"recipe.yaml"}
    assert sorted(os.listdir(tmp_path)) == ["direct", "model", "out"]
