"""What is done is not lost when a later checkpoint fails, or when somebody has seen enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, saved, token_ids
from safetensors.torch import load_file, save_file
from shell import run_here
from words import byte_tokenizer

import calipers
from calipers import errors
from calipers.evaluation import Evaluation, evaluate
from calipers.evaluation.loading import Checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*samples were evaluated.*")

TEXT = "The quick brown fox jumps over the lazy dog. " * 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a checkpoint, and another one that computes NaN."""
    folder = tmp_path_factory.mktemp("partial")
    saved(build(), folder / "float")
    byte_tokenizer().save_pretrained(folder / "float")
    for name in ("fine", "broken"):
        calipers.oneshot(folder / "float", "W4A16", output_dir=folder / name, progress=False)
    tensors = load_file(folder / "broken" / "model.safetensors")
    tensors["model.norm.weight"][:] = torch.nan
    save_file(tensors, folder / "broken" / "model.safetensors", metadata={"format": "pt"})
    (folder / "text.txt").write_text(TEXT)
    return folder


def arguments(folder: Path, *more: str) -> tuple[str, ...]:
    paths = [str(folder / name) for name in ("float", "fine", "broken")]
    data = ("--data", str(folder / "text.txt"), "--seq-len", "16", "--samples", "24")
    return ("evaluate", *paths, *data, "--no-layers", *more)


def test_python_is_told_of_each(folder: Path) -> None:
    known: list[Evaluation] = []
    paths = [folder / "fine", folder / "broken"]
    with pytest.raises(errors.TensorValueError, match="'broken' computes logits"):
        evaluate(folder / "float", paths, token_ids(24, 8), layers=False, each=known.append)
    assert [list(each.checkpoints) for each in known] == [[], ["fine"]]
    alone = evaluate(folder / "float", paths[:1], token_ids(24, 8), layers=False)
    assert known[-1].as_dict() == alone.as_dict()


def test_a_failure_shows_what_was_done(folder: Path) -> None:
    done = run_here(*arguments(folder))
    assert done.exit_code == 3
    assert "'broken' computes logits that are NaN or Inf" in done.stderr
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert [line.split()[0] for line in lines[2:5]] == ["float", "fine", "24"]
    assert "Not complete: 1 of 2 checkpoints." in done.stdout
    said = [line for line in done.stderr.splitlines() if ": perplexity " in line]
    assert said[0].startswith("float: perplexity ")
    assert said[1].startswith("fine: perplexity ")
    assert ", change " in said[1]


def test_an_interrupt_shows_what_was_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Checkpoint.load

    def interrupted(self: Checkpoint, **options: Any) -> Any:
        if self.name == "broken":
            raise KeyboardInterrupt
        return load(self, **options)

    monkeypatch.setattr(Checkpoint, "load", interrupted)
    done = run_here(*arguments(folder, "--json"))
    assert done.exit_code == 130
    told = json.loads(done.stdout)
    assert told["complete"] is False
    assert list(told["checkpoints"]) == ["fine"]
    first, second = (json.loads(line) for line in done.stderr.splitlines() if "evaluated" in line)
    assert first["evaluated"]["name"] == "float"
    assert first["evaluated"]["perplexity"] == told["base"]["perplexity"]
    assert second["evaluated"]["change"] == told["checkpoints"]["fine"]["change"]


def test_all_is_done(folder: Path) -> None:
    words = [word for word in arguments(folder, "--json") if not word.endswith("broken")]
    assert json.loads(run_here(*words).stdout)["complete"] is True
