"""A layer solved in stages computes every activation once, and the same ones as without a cache."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from calibrating import batches_of, samples, small
from torch import Tensor, nn

from calipers import GPTQModifier, oneshot
from calipers.calibration import pipelines
from calipers.calibration.partial_forward import ActivationCache, Budget, ResumePoints
from calipers.errors import CalipersWarning
from calipers.topology.tracing import traced

WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 8, "observer": "memoryless_minmax"}
BATCHES, LAYERS, LINEARS = 3, 2, 7


def quantized(kind: str, **recipe: Any) -> dict[str, Tensor]:
    model, batches = small(kind), batches_of(samples(2 * BATCHES), 2)
    modifier = GPTQModifier(weights=WEIGHTS, ignore="lm_head", **recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        oneshot(model, [modifier], list(batches), progress=False)
    found: dict[str, Tensor] = model.state_dict()
    return found


@pytest.mark.parametrize(
    ("kind", "kv_cache"), [("llama", True), ("gemma3", False), ("qwen2_moe", True)]
)
def test_results_are_those_without_memory_for_it(
    kind: str, kv_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = {"num_bits": 8, "type": "float", "observer": "static_minmax"}
    more = {"kv_cache_scheme": scheme} if kv_cache else {}
    found = quantized(kind, **more)
    monkeypatch.setattr(pipelines, "free_memory", lambda _: 0)
    expected = quantized(kind, **more)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(("propagation", "streams"), [("quantized", 1), ("both", 2)])
def test_every_linear_computes_once_for_each_stream(
    propagation: str, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    linear = nn.functional.linear

    def counting(*args: Any) -> Tensor:
        calls["linear"] += 1
        return linear(*args)

    monkeypatch.setattr(nn.functional, "linear", counting)
    # With a damping of its own: for folds, batches are cut.
    quantized("llama", error_propagation=propagation, dampening_frac=0.01)
    traces = LAYERS * LINEARS  # of the first batch; another one is where layers begin
    assert calls["linear"] == traces + LINEARS + streams * LAYERS * LINEARS * BATCHES


class Layer(nn.Module):
    """Two steps, of which the second changes the output of the first in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x)
        kept += 1
        return self.second(kept)


def test_what_is_changed_in_place_is_computed_again() -> None:
    layer = Layer()
    x = torch.randn(2, 4)
    with torch.no_grad():
        with traced("layer", layer) as trace:
            expected = layer(x)
        inside = {f"layer.{name}": module for name, module in layer.named_modules() if name}
        cache = ActivationCache(ResumePoints.of(trace, inside, ()), Budget(1 << 20))
        for _ in range(3):
            with cache.run(0, [layer.second], is_changing=True):
                assert torch.equal(layer(x), expected)
    assert "forward" not in vars(layer.first)


def test_memory_is_given_back() -> None:
    layer, budget = Layer(), Budget(1000)
    x = torch.randn(2, 4)
    with torch.no_grad(), traced("layer", layer) as trace:
        layer(x)
    inside = {f"layer.{name}": module for name, module in layer.named_modules() if name}
    cache = ActivationCache(ResumePoints.of(trace, inside, ()), budget)
    with torch.no_grad(), cache.run(0, [layer.second], is_changing=True):
        layer(x)
    assert budget.left == 1000 - x.nbytes
    cache.clear()
    assert budget.left == 1000
