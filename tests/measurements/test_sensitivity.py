"""Sensitivity: squared gradients of weights, from one backward pass a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import VOCABULARY, build
from measuring import assert_same

import calipers
from calipers import Measurements
from calipers.calibration.sensitivity import _drawn
from calipers.errors import ConfigurationError
from calipers.measurements.info import sample_digests

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")
IDS = torch.randint(VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(5)).tolist()
TEXTS = [row[: 24 - 3 * index] for index, row in enumerate(IDS)]  # padded where they are batched


def measured(model: Any, texts: list[list[int]], **options: Any) -> Measurements:
    given = {"collect": "sensitivity", "num_samples": len(texts), "progress": False, **options}
    return calipers.measure(model, texts, **given)


def sums_of(seen: Measurements) -> dict[str, torch.Tensor]:
    found = {name: seen.get(name, "weight", "sensitivity") for name, _ in seen.tensors()}
    sums = {name: each.fields().get("_sensitivity_sum") for name, each in found.items() if each}
    return {name: each for name, each in sums.items() if each is not None}


def test_gradients_are_those_of_autograd() -> None:
    model = build("llama", torch.float32)
    expected: dict[str, Any] = {}
    for row in TEXTS:
        ids = torch.tensor([row])
        seed = int(sample_digests(ids, torch.ones_like(ids))[0][:12], 16)
        logits = model(input_ids=ids).logits[0, :-1]
        labels = _drawn(logits, seed)
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                squares = module.weight.grad.double().square().mean(0)
                expected[name] = expected.get(name, 0) + squares
    model.zero_grad()
    for batch_size in (1, 4):
        seen = measured(model, TEXTS, batch_size=batch_size)
        found = sums_of(seen)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-9)
        statistic = seen.get("lm_head", "weight", "sensitivity")
        assert statistic is not None
        assert statistic.num_tokens == sum(len(row) - 1 for row in TEXTS)


def test_labels_follow_what_the_model_predicts() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0]).expand(20_000, 3)
    shares = torch.bincount(_drawn(logits, 3), minlength=3) / len(logits)
    torch.testing.assert_close(shares, logits[0].softmax(-1), rtol=0, atol=0.015)


def test_the_model_is_left_as_it_was() -> None:
    model = build("llama", torch.float32)
    model.lm_head.weight.requires_grad_(False)
    before = {name: each.requires_grad for name, each in model.named_parameters()}
    measured(model, TEXTS)
    assert {name: each.requires_grad for name, each in model.named_parameters()} == before
    assert all(each.grad is None for each in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_other_statistics_are_the_same_and_halves_merge(tmp_path: Any) -> None:
    model = build("llama", torch.float32)
    whole = measured(model, TEXTS, batch_size=1)
    plain = measured(model, TEXTS, batch_size=1, collect="")
    for place, statistics in plain.tensors().items():
        for key, each in statistics.items():
            other = whole.tensors()[place][key]
            assert all(torch.equal(v, other.fields()[n]) for n, v in each.fields().items())
    one, two = (measured(model, part, batch_size=1) for part in (TEXTS[:2], TEXTS[2:]))
    one.save(tmp_path / "one")
    assert_same(Measurements.load(tmp_path / "one").merge(two), whole)


def test_experts_that_see_some_tokens() -> None:
    seen = measured(build("mixtral", torch.float32), TEXTS, batch_size=2)
    experts = {name: value for name, value in sums_of(seen).items() if ".experts." in name}
    assert experts
    assert any(float(value.sum()) > 0 for value in experts.values())


def test_layer_by_layer_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs the whole model at once"):
        measured(build("llama", torch.float32), TEXTS, pipeline="sequential")
