"""Folds of the data: which samples each has seen, and what is chosen by them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import captured, run, samples, small
from torch import Tensor

import calipers
from calipers import GPTQModifier, Measurements, oneshot
from calipers.errors import CalipersError, CalipersWarning
from calipers.measurements.info import sample_fold
from calipers.measurements.tensors import parted
from calipers.solvers.gptq import Moments
from calipers.steps import gptq

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

ARGS = {"num_bits": 3, "strategy": "group", "group_size": 8}
DATA = samples(24)
NAME = "model.layers.0.self_attn.q_proj"


def modifier(**given: Any) -> GPTQModifier:
    return GPTQModifier(weights=ARGS, ignore="lm_head", **given)


def quantized(model: Any = None, data: Any = DATA, how: Any = None, **options: Any) -> Any:
    model = small("llama") if model is None else model
    return oneshot(model, [how or modifier()], data, progress=False, **options)


def hessians(count: int) -> list[Tensor]:
    """Σ x xᵀ of what one module sees, of each fold, sample by sample."""
    found = [torch.zeros(32, 32, dtype=torch.float64) for _ in range(count)]
    for row in DATA:
        ids, model = torch.as_tensor(row), small("llama")
        with captured(model) as (inputs, _):
            run(model, [{"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}])
        (seen,) = inputs[NAME]
        seen = seen[0].double()
        found[sample_fold(ids, count)] += seen.T @ seen
    return found


@pytest.mark.parametrize("propagation", ["float", "both"])
@pytest.mark.parametrize("count", [2, 3])
def test_folds_are_what_their_samples_give(
    propagation: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first modules of a model see the same in both streams."""
    asked: list[tuple[Sequence[Moments], Moments]] = []

    def choosing(problems: Any, folds: Sequence[Moments], whole: Moments) -> Any:
        asked.append((folds, whole))
        return choose(problems, folds, whole)

    choose = gptq.choose
    monkeypatch.setattr(gptq, "choose", choosing)
    quantized(how=modifier(error_propagation=propagation), folds=count)
    folds, whole = asked[0]
    expected = hessians(count)
    assert len(folds) == count
    for fold, meant in zip(folds, expected, strict=True):
        torch.testing.assert_close(fold.hessian, meant, rtol=1e-5, atol=1e-5)
    assert sum(fold.tokens for fold in folds) == whole.tokens
    torch.testing.assert_close(whole.hessian, sum(expected), rtol=1e-5, atol=1e-5)  # type: ignore[arg-type]
    if propagation == "both":
        assert whole.cross is not None
        torch.testing.assert_close(whole.cross, whole.hessian)


def test_a_choice_is_the_same_again_and_from_a_file(tmp_path: Path) -> None:
    small("llama").save_pretrained(tmp_path / "model")
    float_only = modifier(error_propagation="float")
    live = [quantized(how=float_only).costs for _ in range(2)]
    file = tmp_path / "file"
    calipers.measure(tmp_path / "model", DATA, collect="hessian", output_file=file, progress=False)
    assert Measurements.load(file).num_folds == 2
    calipers.quantize(tmp_path / "model", [modifier()], file, tmp_path / "out", progress=False)
    written = json.loads((tmp_path / "out" / "calipers.json").read_text())["costs"]
    for name, costs in live[0].items():
        assert costs.chosen.keys() == {"damping"}
        assert costs.chosen == live[1][name].chosen == written[name]["chosen"]


def test_hessians_of_folds_come_back(tmp_path: Path) -> None:
    """Those of the last fold are not in the file of a finished run: they are worked out."""
    place = NAME, "input"
    known = calipers.measure(small("llama"), DATA, collect="hessian", folds=3, progress=False)
    loaded = Measurements.load(known.save(tmp_path / "file"))
    folds = [fold[place]["hessian"] for fold in parted(loaded.with_folds())]
    for fold, meant in zip(folds, hessians(3), strict=True):
        torch.testing.assert_close(fold.fields()["_hessian_sum"][0], meant, rtol=1e-5, atol=1e-5)
    assert loaded.num_folds == known.num_folds == 3


@pytest.mark.parametrize(
    ("data", "options"), [(samples(1), {}), (DATA, {"folds": 1})], ids=["one sample", "one fold"]
)
def test_constants_are_used_where_there_is_too_little_to_choose_by(
    data: Any, options: dict[str, Any]
) -> None:
    model, before = small("llama"), small("llama")
    found = quantized(model, data, **options)
    assert set(found.notes) == set(found.errors)
    assert set(found.notes.values()) == {gptq.NOT_CHOSEN}
    assert not any(costs.chosen for costs in found.costs.values())
    quantized(before, data, modifier(dampening_frac=0.01))
    for one, other in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_damping_that_is_given_is_kept() -> None:
    found = quantized(how=modifier(dampening_frac=0.3))
    assert not found.notes
    assert not any(costs.chosen for costs in found.costs.values())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"folds": 25}, "1 to 8"),
        ({"folds": 0}, "folds"),
        ({"folds": 7, "num_calibration_samples": 6}, "more than the data has samples: 6"),
    ],
)
def test_folds_that_cannot_be_are_refused(options: dict[str, Any], text: str) -> None:
    for call in (quantized, lambda **given: calipers.measure(small("llama"), DATA, **given)):
        with pytest.raises(CalipersError, match=text):
            call(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        with pytest.raises(CalipersError, match="until_stable"):
            calipers.measure(small("llama"), DATA, folds=1, until_stable=True)
