"""Smallest and largest value of each piece that shares a scale."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.operations import Workload, operation


class Extrema(NamedTuple):
    """The range of the finite values of each piece, and how many values were not finite.

    A piece without any finite value has the range (0, 0), and is marked in ``missing``.
    """

    min_vals: Tensor
    max_vals: Tensor
    nonfinite: int = 0
    missing: Tensor | None = None


@operation(lambda pieces: Workload((pieces,)))
def extrema(pieces: Tensor) -> Extrema:
    """Reduce pieces, (observations, *qparam_shape, rows, columns), to their extrema.

    >>> extrema(torch.tensor([[[[1.0, -2.0, float("nan")]]]]))[:3]
    (tensor([-2.]), tensor([1.]), 1)
    """
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
