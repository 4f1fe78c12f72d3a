"""Σx² of each channel."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.operations import Workload, operation
from calipers.kernels.tiles import runs


@operation(lambda tokens, *_, **__: Workload((tokens,)))
def sum_of_squares(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum the squares of a (tokens, channels) matrix over the tokens that count, in float64.

    >>> sum_of_squares(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    tensor([10., 20.], dtype=torch.float64)
    >>> sum_of_squares(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.tensor([True, False]))
    tensor([1., 4.], dtype=torch.float64)
    """
    if mask is not None:
        tokens = tokens[mask.to(tokens.device, torch.bool)]
    total = tokens.new_zeros(tokens.shape[-1], dtype=torch.float64)
    for some in runs(len(tokens), each=tokens.shape[-1]):
        total += tokens[some].double().square().sum(0)
    return total
