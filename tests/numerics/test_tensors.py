from __future__ import annotations

from typing import Any

import pytest
import torch

from calipers.numerics.tensors import as_float, first_tensor, tensor_version

X, Y = torch.ones(1), torch.zeros(2)


@pytest.mark.parametrize(
    "call",
    [
        X,
        ((X, Y), {}),
        ((None, [X]), {"y": Y}),
        (((), [{"x": X}]), {"y": Y}),
        ((3, "x"), {"n": 1, "x": (None, X, Y)}),
    ],
)
def test_the_first_tensor_of_a_call(call: Any) -> None:
    assert first_tensor(call) is X


@pytest.mark.parametrize("call", [None, ((), {}), ((3,), {"x": None}), {1, 2}])
def test_a_call_without_any(call: Any) -> None:
    assert first_tensor(call) is None


def test_version() -> None:
    x = torch.ones(2)
    before = tensor_version(x)
    x[:1].add_(1)
    assert tensor_version(x) == before + 1
    with torch.inference_mode():
        assert tensor_version(torch.ones(1)) == 0


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.int8, torch.float32),
        (torch.int16, torch.float32),
        (torch.int32, torch.float64),
        (torch.int64, torch.float64),
        (torch.bool, torch.float32),
        (torch.float8_e4m3fn, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_floats_that_hold_every_value(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert as_float(torch.ones(1).to(dtype)).dtype == wide
