"""Smallest and largest value of each piece that shares a scale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.dispatch import NATIVE_DTYPES, NativeKernels, geometry, native_for
from calipers.kernels.threads import num_threads

_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in NATIVE_DTYPES}
_ONE_TASK = 1 << 16  # so many values are never shared by threads


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


def _natively(kernels: NativeKernels, pieces: Tensor) -> Extrema:
    values, shape, strides = geometry(pieces)
    low = values.new_empty(tuple(pieces.shape)[1:-2])  # what is not torch.Size takes less time
    high = torch.empty_like(low)
    name, threads = _NAMES[values.dtype], num_threads() if values.numel() > _ONE_TASK else 1
    given = values.data_ptr(), name, *_side_by_side(shape, strides), low.data_ptr(), high.data_ptr()
    nonfinite = kernels.extrema(*given, 0, threads)
    if not nonfinite:
        return Extrema(low, high)
    missing = torch.zeros_like(low, dtype=torch.bool)
    kernels.extrema(*given, missing.data_ptr(), threads)
    return Extrema(low, high, nonfinite, missing)


def _side_by_side(shape: Sequence[int], strides: Sequence[int]) -> tuple[Sequence[int], ...]:
    """Turn pieces that are columns of a matrix in memory into observations of one row each."""
    is_transposed = strides[1] == 1 and strides[4] > 1
    if is_transposed and shape[0] == shape[2] == shape[3] == 1:
        return (shape[4], *shape[:4]), (strides[4], *strides[:4])
    return shape, strides


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
