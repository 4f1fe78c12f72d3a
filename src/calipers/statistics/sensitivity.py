"""How much the loss of a model depends on a weight, by input channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from calipers.kernels.moments import sum_of_squares
from calipers.statistics.base import Reduction, Statistic


class Sensitivity(Statistic):
    """Sums, over sequences, the squared gradients of a weight, all rows of a column together.

    Gradients are those of the loss on words that the model itself would say. Then E[(∂L/∂w)²] is
    how fast the loss grows with (Δw)², and half of Σ E[(∂L/∂w)²]·(Δw)² predicts what errors of the
    weight cost (Fisher information). Rows count alike: what is kept of them is their mean.

    >>> seen = Sensitivity()
    >>> seen.add(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), tokens=4)
    >>> seen.add(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), tokens=4)
    >>> seen.per_token().tolist()
    [1.25, 0.5]
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "_sensitivity_sum": Reduction.SUM,
        "_sensitivity_count": Reduction.SUM,
    }
    _sensitivity_sum: Tensor
    _sensitivity_count: Tensor

    def add(self, gradient: Tensor, tokens: int) -> None:
        """Take in the gradient of the summed loss of so many tokens, in the shape of the weight."""
        squares = sum_of_squares(gradient) / len(gradient)
        self.absorb(_sensitivity_sum=squares, _sensitivity_count=torch.tensor(tokens))

    @property
    def num_tokens(self) -> int:
        """How many tokens had a loss."""
        return int(getattr(self, "_sensitivity_count", 0))

    def configuration(self) -> dict[str, Any]:
        """Return what two statistics have in common that measure the same of a tensor."""
        return {"class": type(self).__qualname__}

    def per_token(self) -> Tensor:
        """Return E[(∂L/∂w)²] of each column, for the loss of one token."""
        return self._sensitivity_sum / self.num_tokens
