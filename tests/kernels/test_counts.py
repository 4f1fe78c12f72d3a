from __future__ import annotations

import numpy as np
import pytest
import torch
from data import DTYPES
from engines import with_engines
from geometries import in_any_memory, pieces

from calipers.kernels.reductions import BINS, NAN_BIN, count_values, distinct_values


def counted_in_numpy(values: torch.Tensor) -> np.ndarray:
    """Count the bits piece by piece; float32 is rounded to bf16 by hand."""
    by_piece = values.movedim(0, -3).reshape(values.shape[1:-2].numel(), -1)
    if values.dtype == torch.float32:
        bits = by_piece.numpy().view(np.uint32).astype(np.uint64)
        codes = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        codes = np.where(by_piece.isnan(), NAN_BIN, codes)
    else:
        codes = by_piece.contiguous().view(torch.int16).numpy().view(np.uint16)
    return np.stack([np.bincount(row.astype(np.int64), minlength=BINS) for row in codes])


@in_any_memory
def test_any_memory(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    values = (torch.randn(shape) * 3).round(decimals=1).to(dtype)
    found = count_values(pieces(memory, shape, values))
    assert found.shape == (*shape[1:3], BINS)
    assert np.array_equal(found.reshape(-1, BINS).numpy(), counted_in_numpy(values))


@with_engines("dtype, length", DTYPES, [1, 5000, 2 * BINS, 2 * BINS + 1])
def test_into_what_was_counted_before(dtype: torch.dtype, length: int) -> None:
    """Short pieces are counted without a table of their own, longer ones with one."""
    first, second = (torch.randn(2, 3, 1, 2, length).to(dtype) for _ in range(2))
    found = count_values(first)
    assert count_values(second, into=found) is found
    assert torch.equal(found, count_values(torch.cat([first, second])))


@pytest.mark.parametrize(
    "into",
    [
        torch.zeros(2, BINS, dtype=torch.int64),
        torch.zeros(1, BINS, dtype=torch.int32),
        torch.zeros(1, 2 * BINS, dtype=torch.int64)[:, ::2],
    ],
    ids=["shape", "dtype", "memory"],
)
def test_into_something_else(into: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"contiguous int64 of shape \(1, 65536\)"):
        count_values(torch.ones(1, 1, 1, 4), into=into)
    assert not into.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_bit_pattern(dtype: torch.dtype) -> None:
    every = torch.arange(BINS).to(torch.int32).to(torch.int16).view(dtype)
    found = count_values(every.repeat(3).reshape(1, 1, 1, -1))
    assert found.tolist() == [[3] * BINS]


def test_float32_is_rounded_to_nearest_even() -> None:
    values = torch.tensor([1.0, 1.00390625, 1.01171875, 3.4e38, -3.4e38, float("nan"), -0.0])
    found = count_values(values.reshape(1, 1, 1, -1)).flatten()
    bins = [0x3F80, 0x3F80, 0x3F82, 0x7F80, 0xFF80, NAN_BIN, 0x8000]
    assert [int(found[code]) for code in bins] == [2, 2, 1, 1, 1, 1, 1]
    assert found.sum() == 7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_only_finite_values_are_distinct_values(dtype: torch.dtype) -> None:
    strange = [float("nan"), float("inf"), -float("inf")]
    pieces = torch.tensor([[2.0, -1.0, 2.0], strange], dtype=dtype).reshape(1, 2, 1, 1, 3)
    values, counts = distinct_values(pieces)
    assert values.tolist() == [0, 2, -1]  # by their bits
    assert counts.tolist() == [[[0, 2, 1]], [[0, 0, 0]]]


def test_a_large_constant() -> None:
    """Many equal neighbours, in several chunks."""
    values = torch.full((1, 1, 3, 3_000_000), 0.5, dtype=torch.bfloat16)
    found = count_values(values)
    assert int(found[0, 0x3F00]) == 9_000_000
    assert int(found.sum()) == 9_000_000
