"""Later layers are calibrated on what the frozen model computes, quantized activations included."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from calibrating import batches_of, samples, small
from torch import Tensor, nn

from calipers import GPTQModifier, oneshot
from calipers.calibration import pipelines
from calipers.calibration.pipelines import LayerStack
from calipers.errors import CalipersWarning
from calipers.solvers.gptq import CurvatureCache
from calipers.statistics.sums import HessianSums

WEIGHTS = {"num_bits": 8, "strategy": "channel", "observer": "memoryless_minmax"}
TOKEN = {"num_bits": 4, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 4, "strategy": "tensor", "dynamic": False, "observer": "static_minmax"}
HISTOGRAM = {**STATIC, "symmetric": False, "observer": "histogram_mse"}
FP8 = {"num_bits": 8, "type": "float", "observer": "static_minmax"}
LINEAR = {"targets": ["Linear"], "weights": WEIGHTS}
ATTENTION = {"targets": ["re:.*self_attn$"], "input_activations": STATIC}
SCHEMES: dict[str, dict[str, Any]] = {
    "dynamic": {"weights": WEIGHTS, "input_activations": TOKEN},
    "static": {"weights": WEIGHTS, "input_activations": STATIC},
    "histogram": {"weights": WEIGHTS, "input_activations": HISTOGRAM},
    "output": {"weights": WEIGHTS, "input_activations": TOKEN, "output_activations": STATIC},
    "kv_cache": {"weights": WEIGHTS, "kv_cache_scheme": FP8},
    "nvfp4": {"scheme": "NVFP4"},
    "attention": {"config_groups": {"group_0": LINEAR, "group_1": ATTENTION}},
}


class Seen:
    """The hidden states behind the last layer, and the Hessians in the order they are solved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hidden: list[Tensor] = []
        self.hessians: list[Tensor] = []
        advance, curvatures = LayerStack.advance, CurvatureCache.of

        def note_hidden(stack: LayerStack, *args: Any) -> None:
            advance(stack, *args)
            self.hidden = list(stack._hidden)

        def note_hessian(cache: CurvatureCache, sums: HessianSums, *args: Any) -> Any:
            self.hessians.append(sums.hessians[0].clone())
            return curvatures(cache, sums, *args)

        monkeypatch.setattr(LayerStack, "advance", note_hidden)
        monkeypatch.setattr(CurvatureCache, "of", note_hessian)


@contextmanager
def inputs_of_linears() -> Iterator[list[Tensor]]:
    """What the matrix products of a model really multiply."""
    inputs: list[Tensor] = []
    linear = nn.functional.linear

    def noting(x: Tensor, *args: Any) -> Tensor:
        inputs.append(x.reshape(-1, x.shape[-1]).double())
        return linear(x, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", noting)
        yield inputs


@pytest.mark.parametrize(
    ("scheme", "propagation", "is_cached"),
    [(scheme, "both", True) for scheme in SCHEMES]
    + [("static", "quantized", True), ("kv_cache", "quantized", False)],
)
def test_the_stream_is_that_of_the_frozen_model(
    scheme: str, propagation: str, is_cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_cached:  # activations are computed again in each stage
        monkeypatch.setattr(pipelines, "free_memory", lambda _: 0)
    model, batches = small("llama"), list(batches_of(samples(5), 1))
    seen = Seen(monkeypatch)
    modifier = GPTQModifier(
        **SCHEMES[scheme], ignore="lm_head", error_propagation=propagation, sweeps=1
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        oneshot(model, modifier, batches, progress=False)
    last = model.model.layers[-1]
    expected: list[Tensor] = []
    last.register_forward_hook(lambda *call: expected.append(call[-1]))
    sums: list[Tensor] = []
    for batch in batches:
        with torch.no_grad(), inputs_of_linears() as inputs:
            model(**batch)
        products = [x.T @ x for x in inputs[: len(seen.hessians)]]
        sums = [a + b for a, b in zip(sums, products, strict=True)] if sums else products
    for stream, output in zip(seen.hidden, expected, strict=True):
        torch.testing.assert_close(stream, output, rtol=1e-4, atol=1e-5)
    for index, (hessian, total) in enumerate(zip(seen.hessians, sums, strict=True)):
        error = torch.linalg.norm(hessian - total) / torch.linalg.norm(total)
        assert error < 1e-4, f"{index}: {float(error)}"
