"""Σx² of each channel, natively."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.moments import sum_of_squares
from calipers.kernels.native import BACKEND, library
from calipers.kernels.threads import num_threads


@sum_of_squares.register(BACKEND)
def _natively(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    kernels = library()
    count, channels = tokens.shape
    sums = tokens.new_empty(kernels.sum_of_squares_chunks(count), channels, dtype=torch.float64)
    marks = None if mask is None else mask.to("cpu", torch.bool).view(torch.uint8).contiguous()
    matrix = tokens.detach().reshape(1, 1, 1, count, channels)
    kernels.sum_of_squares(values=matrix, mask=marks, sums=sums, threads=num_threads())
    return sums.sum(0)
