"""``calipers measure``, ``merge`` and ``show``: from data to a file, and what is in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shell import refused, run

from calipers import Measurements

FEW = ("--samples", "4", "--seq-len", "16")


def as_json(*arguments: object, cwd: Path) -> Any:
    done = run(*map(str, arguments), "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def files(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two halves of the data, and all of it."""
    folder = tmp_path_factory.mktemp("files")
    parts = {"a": FEW, "b": (*FEW, "--skip", "4"), "ab": ("--samples", "8", "--seq-len", "16")}
    for name, options in parts.items():
        done = run("measure", str(model), "--data", str(text), *options, "-o", name, cwd=folder)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"Written to {name}: ")
    return folder


def test_halves_that_are_merged_are_the_whole(files: Path, tmp_path: Path) -> None:
    told = as_json("merge", files / "a", files / "b", "-o", "c", cwd=tmp_path)
    assert (told["samples"], told["tokens"], told["complete"]) == (8, 128, True)
    merged, whole = (as_json("show", file, cwd=tmp_path) for file in ("c", files / "ab"))
    for told in (merged, whole):
        assert told.pop("file")
    assert merged == whole
    assert whole["model"]["class"] == "LlamaForCausalLM"
    assert whole["size"] == sum(row["size"] for row in whole["tensors"])
    assert {row["tokens"] for row in whole["tensors"]} == {128}
    readers = [name for row in whole["tensors"] for name in row["readers"]]
    assert len(readers) == len(set(readers)) == 2 * 7 + 1
    info = Measurements.load(tmp_path / "c").info
    assert info is not None
    assert len(set(info.samples)) == 8


def test_what_a_run_left_that_was_killed_at_its_very_end_goes(
    files: Path, model: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copyfile(files / "a", tmp_path / "a")
    done = Measurements.load(files / "a")
    assert done.info is not None
    partial = Measurements.of_tensors(replace(done.info, run={"batches": 4}), done.tensors())
    partial.save(tmp_path / "a.partial")
    again = run("measure", str(model), "--data", str(text), *FEW, "-o", "a", cwd=tmp_path)
    assert again.returncode == 7
    assert "exists already" in again.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == (files / "a").read_bytes()


def test_what_is_shown(files: Path) -> None:
    done = run("show", "ab", cwd=files)
    row = next(line.split() for line in done.stdout.splitlines() if "0.self_attn.q_proj" in line)
    assert row[:3] == ["model.layers.0.self_attn.q_proj.input", "3", "128"]
    assert row[-1].endswith("%")
    for word in ("LlamaForCausalLM", "fingerprint", "counts", "channel_extrema", "squares"):
        assert word in done.stdout


def test_whether_the_data_suffices_is_told(model: Path, text: Path, tmp_path: Path) -> None:
    options = ("measure", model, "--data", text, "--seq-len", "16", "--samples", "40")
    stopping = (*options, "--until-stable", "--tolerance")
    few = run(*map(str, (*stopping, "5", "-o", "few")), cwd=tmp_path)
    assert "Stopped after 16 of at most 40 samples: they suffice." in few.stdout
    assert "would move by less than 5 of their scale and importance" in few.stdout
    assert "The data suffices." in few.stdout
    told = as_json(*stopping, "1e-9", "-o", "all", cwd=tmp_path)
    assert (told["samples"], told["sufficiency"]["is_sufficient"]) == (40, False)
    shown = " ".join(run("show", "few", cwd=tmp_path).stdout.split())
    assert "would move by less than 0.1 of their scale" in shown
    old = Measurements.load(tmp_path / "few")
    Measurements.of_tensors(old.info, old.tensors()).save(tmp_path / "old")
    shown = " ".join(run("show", "old", cwd=tmp_path).stdout.split())
    assert "Whether the data sufficed is not known" in shown
    for wrong, words in (("0", "a number above 0"), ("much", "a number above 0")):
        done = run(*map(str, (*stopping, wrong, "-o", "none")), cwd=tmp_path)
        assert done.returncode == 2
        assert words in " ".join(done.stderr.split())
    assert not (tmp_path / "none").exists()


def test_what_else_is_collected(model: Path, text: Path, tmp_path: Path) -> None:
    options = (*FEW, "--collect", "hessian,outputs, attention", "-o", "m")
    arguments = map(str, ("measure", model, "--data", text, *options, "--json"))
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {"hessian", "head_counts"} <= told["statistics"].keys()
    # Said before: in memory counts are tables of 65,536, which three statistics of halves have.
    foretold = json.loads(done.stderr.splitlines()[0])["memory"]
    seen = Measurements.load(tmp_path / "m").with_folds()
    held = {
        id(statistic): sum(value.nbytes for value in statistic.fields().values())
        for statistics in seen.values()
        for statistic in statistics.values()
    }
    assert foretold == pytest.approx(sum(held.values()), rel=0.5)
    assert foretold > sum(held.values())  # the second half has tables, too, which are not stored
    assert {row["tensor"].rpartition(".")[2] for row in told["tensors"]} == {
        *("input", "output", "q", "k", "v")
    }
    assert told["file_size"] == (tmp_path / "m").stat().st_size > told["size"]


MEASURE = ("measure", "{model}", "--data", "{text}")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((*MEASURE, "-o", "folder"), 7, "folder': it is a folder. Choose another file."),
        ((*MEASURE, "-o", "file/m"), 7, "file' is a file. Choose another file."),
        ((*MEASURE, "-o", "file"), 7, "or pass --overwrite to replace it."),
        ((*MEASURE, "-o", "file", "--overwrite"), 7, "it is no file of measurements"),
        ((*MEASURE, "-o", "{text}", "--overwrite"), 7, "would replace the data in use"),
        (
            (*MEASURE, "-o", "{model}/config.json", "--overwrite"),
            *(7, "would replace the model in use"),
        ),
        (("measure", "{model}", "-o", "m"), 2, "The command has no --data to measure with."),
        ((*MEASURE, "-o", "m", "--collect", "x"), 2, "--collect x is not allowed."),
        (("merge", "a", "-o", "m"), 2, "has 1 file to merge. Give two or more."),
        (("merge", "a", "a", "-o", "m"), 5, "'a': Cannot merge: 4 samples were seen by both"),
        (("merge", "a", "ab", "-o", "ab", "--overwrite"), 7, "would replace the file in use"),
        (("merge", "a", "file", "-o", "m"), 2, "is damaged, or no file of measurements"),
        (("show", "file"), 2, "is damaged, or no file of measurements: 6 bytes, which end before"),
        (("show", "gone"), 2, "it cannot be read (No such file or directory)"),
        (("show", "{model}/model.safetensors"), 2, "its header has no 'calipers'"),
    ],
)
def test_what_is_refused(
    arguments: Sequence[str],
    code: int,
    said: str,
    files: Path,
    model: Path,
    text: Path,
    tmp_path: Path,
) -> None:
    for name in ("a", "ab"):
        shutil.copy(files / name, tmp_path / name)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("my own")
    words = [word.format(model=model, text=text) for word in arguments]
    refused(words, said, code=code, cwd=tmp_path)
