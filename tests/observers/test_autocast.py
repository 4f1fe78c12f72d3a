"""What an observer knows and answers does not depend on autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from laws import FOR_INPUTS, assert_same, build
from pairwise import pairwise

from calipers.observers import Observer

INT8 = QuantizationArgs(num_bits=8, symmetric=False)
W4 = QuantizationArgs(num_bits=4, group_size=16)
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.filterwarnings("ignore:.*Falls back to plain error")
@pytest.mark.parametrize(
    ("name", "half", "dtype"), pairwise(FOR_INPUTS, HALVES, [*HALVES, torch.float32])
)
def test_activations(name: str, half: torch.dtype, dtype: torch.dtype) -> None:
    stream = [torch.randn(6, 32).to(dtype) for _ in range(2)]
    expected = build(name, "input", INT8, stream)
    with torch.autocast("cpu", dtype=half):
        observer = build(name, "input", INT8, stream)
        assert_same(observer, expected)
        scale, zero_point = observer
    for ours, theirs in zip((scale, zero_point), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("imatrix_mse", {}),
        ("optimal", {"importance": "imatrix"}),
        ("optimal", {"importance": "hessian"}),
    ],
)
def test_sums_of_inputs(name: str, options: dict[str, Any], half: torch.dtype) -> None:
    linear, x = torch.nn.Linear(32, 8), torch.randn(64, 32)

    def gathered() -> Observer:
        observer = Observer.load_from_registry(name, base_name="weight", args=W4, **options)
        observer.attach(linear)
        linear(x)
        observer.detach(linear)
        observer.gathering.take_over(linear)
        return observer(linear.weight)

    expected = gathered()
    with torch.autocast("cpu", dtype=half):
        assert_same(gathered(), expected)
