"""One pass finds what the three operations find one after the other, to the bit."""

from __future__ import annotations

import pytest
import torch
from data import DTYPES
from engines import NATIVE_ENGINES, with_engines
from torch import Tensor

from calipers.kernels.reductions import (
    BINS,
    count_values,
    extrema,
    sum_of_squares,
    summarize_channels,
)

SHAPES = [(1, 1), (1, 40), (7, 3), (255, 17), (700, 33), (300, 1100), (515, 2049)]
MEMORIES = ["contiguous", "transposed", "every_third", "misaligned"]


def laid_out(memory: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Values of which some are equal, in memory as told."""
    tokens, channels = shape
    values = (torch.randn(tokens, 3 * channels + 1) * 3).round(decimals=1).to(dtype)
    if memory == "transposed":
        return values[:, :channels].t().contiguous().t()
    if memory == "every_third":
        return values[:, : 3 * channels : 3]
    start = 1 if memory == "misaligned" else 0
    kept = values[:, start : start + channels]
    return kept if memory == "misaligned" else kept.contiguous()


@with_engines("shape, memory, dtype, masked", SHAPES, MEMORIES, DTYPES, [False, True])
def test_against_the_three_operations(
    shape: tuple[int, int], memory: str, dtype: torch.dtype, masked: bool
) -> None:
    tokens = laid_out(memory, shape, dtype)
    mask = torch.rand(shape[0]) < 0.3 if masked else None
    if mask is not None:
        mask[-1] = True
        mask[: shape[0] // 2] = False  # chunks of which no token counts
    kept = tokens if mask is None else tokens[mask]
    counts = torch.ones(1, BINS, dtype=torch.int64)
    found = summarize_channels(tokens, mask, counts=counts)
    assert found is not None
    low, high, *_ = extrema(kept[:, :, None, None])
    assert found.extrema.dtype == dtype
    assert torch.equal(found.extrema, torch.stack([low, high]))
    assert torch.equal(found.square_sums, sum_of_squares(tokens, mask))
    assert torch.equal(counts, count_values(kept[:, None, None]) + 1)


@with_engines("dtype, strange", DTYPES, [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite(dtype: torch.dtype, strange: float) -> None:
    """They are noticed and counted where their token counts, and only there."""
    tokens = torch.randn(300, 37).to(dtype)
    tokens[299, 36] = strange
    counts = torch.zeros(1, BINS, dtype=torch.int64)
    assert summarize_channels(tokens, counts=counts) is None
    assert torch.equal(counts, count_values(tokens[:, None, None]))
    mask = torch.arange(300) < 299
    found = summarize_channels(tokens, mask)
    assert found is not None
    assert torch.equal(found.extrema[1], tokens[:299].amax(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros(dtype: torch.dtype) -> None:
    counts = torch.zeros(1, BINS, dtype=torch.int64)
    found = summarize_channels(torch.zeros(5, 2, dtype=dtype), counts=counts)
    assert found is not None
    assert not found.extrema.any()
    assert not found.square_sums.any()
    assert (int(counts[0, 0]), int(counts.sum())) == (10, 10)


@with_engines("dtype", DTYPES, engines=NATIVE_ENGINES)
def test_a_table_of_the_wrong_size_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="counts has the wrong size"):
        summarize_channels(torch.ones(2, 3, dtype=dtype), counts=torch.zeros(5, dtype=torch.int64))
