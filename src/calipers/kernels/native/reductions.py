"""Reductions, natively."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.native import BACKEND, library
from calipers.kernels.operations import Declined
from calipers.kernels.reductions import (
    ChannelSummary,
    Extrema,
    add_counts,
    extrema,
    sum_of_products,
    sum_of_squares,
    summarize_channels,
)
from calipers.kernels.resources import num_threads
from calipers.numerics.layout import as_grid

_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in BACKEND.accepts.dtypes or ()}
_ONE_TASK = 1 << 16  # so many values are never shared by threads


@extrema.register(BACKEND)
def _extrema(pieces: Tensor) -> Extrema:
    """Tell the kernel the sizes and strides that ``as_grid`` would give.

    No tensor is made for them, and arguments have no names, which counts where tensors are small.
    """
    kernels, values = library().module, pieces
    if pieces.ndim > 5 or pieces.is_neg():  # the address of the latter's memory would be taken
        values = as_grid(pieces.resolve_neg())
    (observations, *sizes), (step, *steps) = values.shape, values.stride()
    ones = (1,) * (4 - len(sizes))
    shape, strides = (observations, *ones, *sizes), (step, *ones, *steps)
    if shape[3] > 1 and strides[3] < strides[4]:
        shape, strides = (*shape[:3], shape[4], shape[3]), (*strides[:3], strides[4], strides[3])
    # Pieces that are columns of a matrix in memory are taken as observations of one row each.
    if strides[1] == 1 and strides[4] > 1 and shape[0] == shape[2] == shape[3] == 1:
        shape, strides = (shape[4], *shape[:4]), (strides[4], *strides[:4])
    low = values.new_empty(tuple(pieces.shape)[1:-2])  # what is not torch.Size takes less time
    high = torch.empty_like(low)
    threads = num_threads() if values.numel() > _ONE_TASK else 1
    arguments = values, _NAMES[values.dtype], shape, strides, low, high
    nonfinite = kernels.extrema(*arguments, None, threads)
    if not nonfinite:
        return Extrema(low, high)
    missing = torch.zeros_like(low, dtype=torch.bool)
    kernels.extrema(*arguments, missing, threads)
    return Extrema(low, high, nonfinite, missing)


@sum_of_squares.register(BACKEND)
def _sum_of_squares(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    kernels = library()
    count, channels = tokens.shape
    sums = tokens.new_empty(kernels.sum_of_squares_chunks(count), channels, dtype=torch.float64)
    marks = None if mask is None else mask.to("cpu", torch.bool).view(torch.uint8).contiguous()
    matrix = tokens.detach().reshape(1, 1, 1, count, channels)
    kernels.sum_of_squares(values=matrix, mask=marks, sums=sums, threads=num_threads())
    return sums.sum(0)


@sum_of_products.register(BACKEND, dtypes=(torch.bfloat16,))
def _sum_of_products(left: Tensor, right: Tensor | None = None) -> Tensor | Declined:
    kernels = library()
    if not kernels.can_add_products():
        return Declined("this processor does not multiply bfloat16")  # it has no AVX512_BF16
    other = left if right is None else right
    total = left.new_zeros(left.shape[1], other.shape[1], dtype=torch.float64)
    x, y = (
        each.detach() if each.stride(1) == 1 else each.detach().contiguous()
        for each in (left, other)
    )
    symmetric, threads = right is None, num_threads()
    kernels.add_products(left=x, right=y, total=total, symmetric=symmetric, threads=threads)
    return total


@add_counts.register(BACKEND)
def _add_counts(pieces: Tensor, table: Tensor) -> None:
    library().count_values(values=as_grid(pieces), counts=table, threads=num_threads())


@summarize_channels.register(BACKEND)
def _summarize_channels(
    tokens: Tensor, mask: Tensor | None = None, *, counts: Tensor | None = None
) -> ChannelSummary | None:
    kernels = library()
    count, channels = tokens.shape
    chunks = kernels.sum_of_squares_chunks(count)
    parts = () if chunks == 1 else (chunks,)
    ranges = tokens.new_empty(2, *parts, channels)
    sums = tokens.new_empty(*parts, channels, dtype=torch.float64)
    marks = None if mask is None else mask.view(torch.uint8).contiguous()
    matrix = tokens.detach().view(1, 1, 1, count, channels)
    all_finite = kernels.summarize_channels(
        values=matrix, mask=marks, sums=sums, ranges=ranges, counts=counts, threads=num_threads()
    )
    if not all_finite:
        return None
    if parts:
        low, high = ranges
        return ChannelSummary(torch.stack([low.amin(0), high.amax(0)]), sums.sum(0))
    return ChannelSummary(ranges, sums)
