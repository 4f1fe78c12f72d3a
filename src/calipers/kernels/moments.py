"""Σx² of each channel."""

from __future__ import annotations

import torch
from torch import Tensor


def sum_of_squares(tokens: Tensor) -> Tensor:
    """Square in float32 or better, sum over the tokens in float64.

    >>> sum_of_squares(torch.tensor([[1.0, -2.0], [3.0, 4.0]]))
    tensor([10., 20.], dtype=torch.float64)
    """
    precise = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return precise.square().sum(0, dtype=torch.float64)
