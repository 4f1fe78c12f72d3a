"""How strongly each input channel is used: Σx² and the number of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from calipers.kernels.moments import sum_of_squares
from calipers.statistics.base import Reduction, Statistic
from calipers.statistics.guarding import full_precision


class SquareSums(Statistic):
    """Sums x² of each channel in float64, so that the order of the data hardly rounds.

    >>> sums = SquareSums()
    >>> sums.absorb_tokens(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    >>> sums._imatrix_sum.tolist(), int(sums._imatrix_count)
    ([10.0, 4.0], 2)
    >>> sums.absorb_tokens(torch.tensor([[1.0, 1.0], [9.0, 9.0]]), torch.tensor([True, False]))
    >>> sums._imatrix_sum.tolist(), int(sums._imatrix_count)
    ([11.0, 5.0], 3)
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "_imatrix_sum": Reduction.SUM,
        "_imatrix_count": Reduction.SUM,
    }
    _imatrix_sum: Tensor
    _imatrix_count: Tensor

    @full_precision()
    def absorb_tokens(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in activations of shape (…, channels); ``mask``, shape (…), says which count."""
        tokens = x.detach().reshape(-1, x.shape[-1])
        marks = None if mask is None else mask.reshape(-1).to(x.device, torch.bool)
        count = torch.tensor(len(tokens), device=x.device) if marks is None else marks.sum()
        self.absorb(_imatrix_sum=sum_of_squares(tokens, marks), _imatrix_count=count)
