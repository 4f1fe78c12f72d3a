"""What processes exchange arrives as it was, and is no pickle."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import calipers
from calipers.statistics.distributed import decode, encode

WHOLE = torch.arange(12.0).reshape(3, 4)
NAN = float("nan")
VALUES: list[Any] = [
    *(None, True, 2**70, -0.1, "ü\n\0", (), [], {}, set(), math.inf, torch.bfloat16),
    {("model.layers.0", "input"): {"scale": torch.ones(1), "global_scale": None}},
    [(torch.tensor(1.5), WHOLE[1], WHOLE.t()), {"a", "b"}, [[[("x",)]]], {1: 2, "1": 3}],
    torch.empty(0, 3),
    [WHOLE, WHOLE],
    torch.tensor([NAN, -0.0, math.inf], dtype=torch.float16),
]
DTYPES = [
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16, torch.float64),
    *(torch.int8, torch.int64, torch.uint16, torch.bool),
]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tolist().__repr__() == expected.tolist().__repr__()
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    else:
        assert found == expected


@pytest.mark.parametrize("value", VALUES)
def test_what_is_exchanged_arrives_as_it_was(value: Any) -> None:
    assert_same(decode(encode(value)), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype) -> None:
    value = torch.tensor([[0, 1, 2, 1]]).to(dtype)
    found = decode(encode([value, value[0, 1]]))
    assert [each.dtype for each in found] == [dtype, dtype]
    assert torch.equal(found[0].view(torch.uint8), value.view(torch.uint8))
    assert found[1].shape == ()


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="processes cannot exchange a complex"):
        encode([1j])


def test_nothing_in_the_package_reads_pickles() -> None:
    words = ("import pickle", "torch.load(", "torch.save(", "gather_object", "object_list")
    for file in Path(calipers.__file__).parent.rglob("*.py"):
        text = file.read_text()
        assert not [word for word in words if word in text], file
