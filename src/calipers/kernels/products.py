"""Σ x yᵀ over tokens: products of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.operations import Workload, operation

_TOKENS = 256  # added up in float32, as the native kernel does; more in wide products
_STRIP = 192  # rows of a symmetric product that are computed together, up to the diagonal


@operation(lambda left, right=None: Workload((left,) if right is None else (left, right)))
@torch.no_grad()
def sum_of_products(left: Tensor, right: Tensor | None = None) -> Tensor:
    """Return leftᵀ right of two matrices (tokens, channels) in float64; of ``left`` alone if one.

    Sums of some hundred tokens are made in float32, and added up in float64. The product of a
    matrix with itself is computed on one side of its diagonal, hence exactly symmetric.

    >>> sum_of_products(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    tensor([[10.,  2.],
            [ 2.,  4.]], dtype=torch.float64)
    """
    other = left if right is None else right
    total = left.new_zeros(left.shape[1], other.shape[1], dtype=torch.float64)
    if not total.numel() or not len(left):
        return total
    working = torch.promote_types(left.dtype, torch.float32)
    step = max(_TOKENS, total.shape[1] // 4)
    for x, y in zip(torch.split(left, step), torch.split(other, step), strict=True):
        x = x.to(working)
        if right is not None:
            total += x.T @ y.to(working)
            continue
        for rows in _strips(total):
            total[rows, : rows.stop] += x[:, rows].T @ x[:, : rows.stop]
    if right is None:
        for rows in _strips(total):
            total[: rows.start, rows] = total[rows, : rows.start].T
            total[rows, rows] = total[rows, rows].tril() + total[rows, rows].tril(-1).T
    return total


def _strips(total: Tensor) -> list[slice]:
    starts = range(0, len(total), _STRIP)
    return [slice(start, min(start + _STRIP, len(total))) for start in starts]
