"""Smallest and largest value of each piece that shares a scale."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.dispatch import as_grid, native_for, num_threads


class Extrema(NamedTuple):
    """The range of the finite values of each piece, and how many values were not finite.

    A piece without any finite value has the range (0, 0), and is marked in ``missing``.
    """

    min_vals: Tensor
    max_vals: Tensor
    nonfinite: int = 0
    missing: Tensor | None = None


def extrema(pieces: Tensor) -> Extrema:
    """Reduce pieces, (observations, *qparam_shape, rows, columns), to their extrema.

    >>> extrema(torch.tensor([[[[1.0, -2.0, float("nan")]]]]))[:3]
    (tensor([-2.]), tensor([1.]), 1)
    """
    kernels = native_for(pieces)
    return _natively(kernels, pieces) if kernels else _in_torch(pieces)


def _natively(kernels: ModuleType, pieces: Tensor) -> Extrema:
    grid, shape = _side_by_side(as_grid(pieces)), pieces.shape[1:-2]
    chunks, count = kernels.extrema_chunks(grid), shape.numel()
    low, high = pieces.new_empty(2, chunks, count)
    nonfinite = kernels.extrema(grid, low, high, None, num_threads())
    if not nonfinite:
        if chunks > 1:
            low, high = low.amin(0), high.amax(0)
        return Extrema(low.reshape(shape), high.reshape(shape))
    any_finite = torch.ones(chunks, count, dtype=torch.uint8)
    kernels.extrema(grid, low, high, any_finite, num_threads())
    empty = any_finite == 0
    missing = empty.all(0)
    low = low.masked_fill_(empty, torch.inf).amin(0).masked_fill_(missing, 0)
    high = high.masked_fill_(empty, -torch.inf).amax(0).masked_fill_(missing, 0)
    return Extrema(low.reshape(shape), high.reshape(shape), nonfinite, missing.reshape(shape))


def _side_by_side(grid: Tensor) -> Tensor:
    """Turn pieces that are columns of a matrix in memory into observations of one row each."""
    is_transposed = grid.stride(1) == 1 and grid.stride(4) > 1
    if is_transposed and grid.shape[0] == grid.shape[2] == grid.shape[3] == 1:
        return grid.permute(4, 0, 1, 2, 3)
    return grid


def _in_torch(pieces: Tensor) -> Extrema:
    dims = (0, -2, -1)
    low, high = pieces.amin(dims), pieces.amax(dims)
    # NaN spreads and Inf is extreme: finite extrema prove that every value is finite.
    if bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        return Extrema(low, high)
    finite = torch.isfinite(pieces)
    low = pieces.masked_fill(~finite, torch.inf).amin(dims)
    high = pieces.masked_fill(~finite, -torch.inf).amax(dims)
    missing = ~finite.any(-1).any(-1).any(0)
    low, high = low.masked_fill_(missing, 0), high.masked_fill_(missing, 0)
    return Extrema(low, high, finite.numel() - int(finite.sum()), missing)
