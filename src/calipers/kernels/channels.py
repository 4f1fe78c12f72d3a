"""Counts of values, extrema and Σx² of the channels of a tensor, found in one pass over it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.counts import count_values
from calipers.kernels.extrema import extrema
from calipers.kernels.moments import sum_of_squares
from calipers.kernels.operations import Workload, operation


class ChannelSummary(NamedTuple):
    """What was found in each channel of a matrix whose values are all finite.

    :param extrema: the smallest value of each channel, and the largest: (2, channels)
    :param square_sums: Σx² of each channel, float64
    """

    extrema: Tensor
    square_sums: Tensor


@operation(lambda tokens, *_, **__: Workload((tokens,)))
def summarize_channels(
    tokens: Tensor, mask: Tensor | None = None, *, counts: Tensor | None = None
) -> ChannelSummary | None:
    """Look once at a (tokens, channels) matrix, of which at least one token counts.

    None if a value is not finite. Values are counted in any case.

    :param mask: which tokens count, bool; None for all
    :param counts: what :func:`count_values` returns for the whole matrix; it is added to

    >>> found = summarize_channels(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    >>> found.extrema.tolist(), found.square_sums.tolist()
    ([[1.0, -2.0], [3.0, 4.0]], [10.0, 20.0])
    """
    kept = tokens if mask is None else tokens[mask]
    if counts is not None:
        count_values(kept[:, None, None], into=counts)
    found = extrema(kept[:, :, None, None])
    if found.nonfinite:
        return None
    ranges = torch.stack([found.min_vals, found.max_vals])
    return ChannelSummary(ranges, sum_of_squares(tokens, mask))
