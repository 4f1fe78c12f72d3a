"""Extrema, natively."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from calipers.kernels.extrema import Extrema, extrema
from calipers.kernels.native import BACKEND, library
from calipers.kernels.pieces import as_grid
from calipers.kernels.threads import num_threads

_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in BACKEND.accepts.dtypes or ()}
_ONE_TASK = 1 << 16  # so many values are never shared by threads


@extrema.register(BACKEND)
def _natively(pieces: Tensor) -> Extrema:
    kernels = library().module
    values, shape, strides = _geometry(pieces)
    low = values.new_empty(tuple(pieces.shape)[1:-2])  # what is not torch.Size takes less time
    high = torch.empty_like(low)
    name, threads = _NAMES[values.dtype], num_threads() if values.numel() > _ONE_TASK else 1
    given = values, name, *_side_by_side(shape, strides), low, high
    nonfinite = kernels.extrema(*given, None, threads)
    if not nonfinite:
        return Extrema(low, high)
    missing = torch.zeros_like(low, dtype=torch.bool)
    kernels.extrema(*given, missing, threads)
    return Extrema(low, high, nonfinite, missing)


def _side_by_side(shape: Sequence[int], strides: Sequence[int]) -> tuple[Sequence[int], ...]:
    """Turn pieces that are columns of a matrix in memory into observations of one row each."""
    is_transposed = strides[1] == 1 and strides[4] > 1
    if is_transposed and shape[0] == shape[2] == shape[3] == 1:
        return (shape[4], *shape[:4]), (strides[4], *strides[:4])
    return shape, strides


def _geometry(pieces: Tensor) -> tuple[Tensor, Sequence[int], Sequence[int]]:
    """Return what ``as_grid`` does as sizes and strides, and the tensor whose memory they are of.

    No tensor is made for it, which counts where tensors are small.
    """
    if pieces.ndim > 5 or pieces.is_neg():  # the address of the latter's memory would be taken
        grid = as_grid(pieces.resolve_neg())
        return grid, grid.shape, grid.stride()
    (observations, *sizes), (step, *steps) = pieces.shape, pieces.stride()
    missing = (1,) * (4 - len(sizes))
    shape, strides = (observations, *missing, *sizes), (step, *missing, *steps)
    if shape[3] > 1 and strides[3] < strides[4]:
        shape, strides = (*shape[:3], shape[4], shape[3]), (*strides[:3], strides[4], strides[3])
    return pieces, shape, strides
