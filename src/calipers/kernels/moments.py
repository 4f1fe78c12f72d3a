"""Σx² of each channel."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.dispatch import NativeKernels, native_for
from calipers.kernels.threads import num_threads
from calipers.kernels.tiles import runs


def sum_of_squares(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum the squares of a (tokens, channels) matrix over the tokens that count, in float64.

    >>> sum_of_squares(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    tensor([10., 20.], dtype=torch.float64)
    >>> sum_of_squares(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.tensor([True, False]))
    tensor([1., 4.], dtype=torch.float64)
    """
    kernels = native_for(tokens)
    return _natively(kernels, tokens, mask) if kernels else _in_torch(tokens, mask)


def _natively(kernels: NativeKernels, tokens: Tensor, mask: Tensor | None) -> Tensor:
    count, channels = tokens.shape
    sums = tokens.new_empty(kernels.sum_of_squares_chunks(count), channels, dtype=torch.float64)
    marks = None if mask is None else mask.to("cpu", torch.bool).view(torch.uint8).contiguous()
    matrix = tokens.detach().reshape(1, 1, 1, count, channels)
    kernels.sum_of_squares(matrix, marks, sums, num_threads())
    return sums.sum(0)


def _in_torch(tokens: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        tokens = tokens[mask.to(tokens.device, torch.bool)]
    total = tokens.new_zeros(tokens.shape[-1], dtype=torch.float64)
    for some in runs(len(tokens), each=tokens.shape[-1]):
        total += tokens[some].double().square().sum(0)
    return total
