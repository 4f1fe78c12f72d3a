"""Checkpoints that transformers does not compute as they are: loaded otherwise, or labelled."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from families import build, saved, token_ids

import calipers
from calipers import errors
from calipers.evaluation import Evaluation, evaluate
from calipers.evaluation.loading import find_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:.*samples were evaluated.*")


def written(
    folder: Path, family: str, scheme: str, dtype: torch.dtype = torch.float32
) -> tuple[Path, list[str]]:
    """Write a checkpoint, and return what was said of it."""
    saved(build(family, dtype), folder / family)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", errors.CalipersWarning)
        calipers.oneshot(folder / family, scheme, output_dir=folder / scheme, progress=False)
    ours = [each for each in said if issubclass(each.category, errors.CalipersWarning)]
    return folder / scheme, [str(each.message) for each in ours]


@pytest.mark.parametrize(
    ("family", "scheme", "count"),
    [
        ("llama", "W4A16", 0),
        ("mixtral", "NVFP4A16", 2),
        ("qwen3-moe", "FP8_DYNAMIC", 1),
        ("mixtral", "W4A16_ASYM", 1),
    ],
)
def test_reading_says_what_writing_said(
    family: str, scheme: str, count: int, tmp_path: Path
) -> None:
    path, said = written(tmp_path, family, scheme)
    assert [str(problem) for problem in find_checkpoint("it", path).problems] == said
    assert len(said) == count


def test_nvfp4_in_float32_is_loaded_as_bfloat16(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "llama", "NVFP4A16")
    text = (
        "It is loaded as bfloat16: transformers decodes nvfp4-pack-quantized to bfloat16, and "
        "this model is torch.float32."
    )
    with pytest.warns(errors.CalipersWarning, match=f"^'NVFP4A16': {text}$"):
        found = evaluate(tmp_path / "llama", [path], token_ids(8, 8))
    scores = found.checkpoints["NVFP4A16"]
    assert (scores.notes, scores.reliable) == ((text,), True)
    assert 0 < scores.kl.value < 1
    assert all(0.01 < layer.own < 0.1 for layer in scores.layers)


def test_experts_that_are_computed_wrongly_are_labelled(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "mixtral", "NVFP4A16", torch.bfloat16)
    text = "transformers loads NVFP4 experts without their global scale, and so computes nonsense"
    with pytest.warns(errors.CalipersWarning, match=f"^'NVFP4A16': {text}"):
        found = evaluate(tmp_path / "mixtral", [path], token_ids(8, 8), layers=False)
    told = found.as_dict()["checkpoints"]["NVFP4A16"]
    assert told["reliable"] is False
    (note,) = told["notes"]
    assert note.startswith(text)
    assert note.endswith("are those of what transformers computes instead.")


@pytest.mark.filterwarnings("ignore:'NVFP4A16'")
def test_what_transformers_cannot_compute_at_all_is_told(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "mixtral", "NVFP4A16")
    text = "^transformers fails on 'NVFP4A16' .*dtype.*, as was to be expected: It is loaded as"
    with pytest.raises(errors.ModelRunError, match=text) as caught:
        evaluate(tmp_path / "mixtral", [path], token_ids(8, 8), layers=False)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("wrong", ["gone", "other"])
def test_what_is_wrong_is_said_before_anything_runs(wrong: str, tmp_path: Path) -> None:
    saved(build(), tmp_path / "float")
    saved(build(num_hidden_layers=3), tmp_path / "other")
    known: list[Evaluation] = []
    kind = errors.ModelLoadError if wrong == "gone" else errors.ConfigurationError
    with pytest.raises(kind):
        evaluate(
            tmp_path / "float",
            [tmp_path / "float", tmp_path / wrong],
            torch.ones(8, 8, dtype=torch.int64),
            each=known.append,
        )
    assert not known
