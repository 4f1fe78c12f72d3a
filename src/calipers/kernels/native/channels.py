"""Counts, extrema and Σx² of channels, natively."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.channels import ChannelSummary, summarize_channels
from calipers.kernels.native import BACKEND, library
from calipers.kernels.threads import num_threads


@summarize_channels.register(BACKEND)
def _natively(
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
