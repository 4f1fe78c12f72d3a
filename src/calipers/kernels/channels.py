"""Counts of values, extrema and Σx² of the channels of a tensor, found in one pass over it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.counts import count_values
from calipers.kernels.dispatch import NativeKernels, native_for
from calipers.kernels.extrema import extrema
from calipers.kernels.moments import sum_of_squares
from calipers.kernels.threads import num_threads


class ChannelSummary(NamedTuple):
    """What was found in each channel of a matrix whose values are all finite.

    :param extrema: the smallest value of each channel, and the largest: (2, channels)
    :param square_sums: Σx² of each channel, float64
    """

    extrema: Tensor
    square_sums: Tensor


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
    kernels = native_for(tokens)
    if kernels:
        return _natively(kernels, tokens, mask, counts)
    return _one_by_one(tokens, mask, counts)


def _natively(
    kernels: NativeKernels, tokens: Tensor, mask: Tensor | None, counts: Tensor | None
) -> ChannelSummary | None:
    count, channels = tokens.shape
    chunks = kernels.sum_of_squares_chunks(count)
    parts = () if chunks == 1 else (chunks,)
    ranges = tokens.new_empty(2, *parts, channels)
    sums = tokens.new_empty(*parts, channels, dtype=torch.float64)
    marks = None if mask is None else mask.view(torch.uint8).contiguous()
    matrix = tokens.detach().view(1, 1, 1, count, channels)
    threads = num_threads()
    if not kernels.summarize_channels(matrix, marks, sums, ranges, counts, threads):
        return None
    if parts:
        low, high = ranges
        return ChannelSummary(torch.stack([low.amin(0), high.amax(0)]), sums.sum(0))
    return ChannelSummary(ranges, sums)


def _one_by_one(
    tokens: Tensor, mask: Tensor | None, counts: Tensor | None
) -> ChannelSummary | None:
    kept = tokens if mask is None else tokens[mask]
    if counts is not None:
        count_values(kept[:, None, None], into=counts)
    found = extrema(kept[:, :, None, None])
    if found.nonfinite:
        return None
    ranges = torch.stack([found.min_vals, found.max_vals])
    return ChannelSummary(ranges, sum_of_squares(tokens, mask))
