"""How much the loss of a model depends on a weight, by input channel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from calipers.kernels.moments import sum_of_squares
from calipers.statistics.base import Reduction, Statistic
from calipers.statistics.moments import problem_with_channels

_AT_ONCE = 1 << 22
"""Numbers of a gradient that are in memory at a time."""


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
        self._add(sum_of_squares(gradient) / len(gradient), tokens)

    def add_product(self, outputs: Tensor, inputs: Tensor, tokens: int) -> None:
        """Take in the gradient outputsᵀ inputs, of which a part is in memory at a time.

        :param outputs: the gradients of the outputs of the module, (positions, rows)
        :param inputs: what came in, (positions, columns)
        """
        width = max(1, _AT_ONCE // inputs.shape[-1])
        parts = (sum_of_squares(some.T @ inputs) for some in torch.split(outputs, width, dim=1))
        squares = sum(parts, inputs.new_zeros(inputs.shape[-1], dtype=torch.float64))
        self._add(squares / outputs.shape[-1], tokens)

    def _add(self, squares: Tensor, tokens: int) -> None:
        self.absorb(_sensitivity_sum=squares, _sensitivity_count=torch.tensor(tokens))

    @property
    def num_tokens(self) -> int:
        """How many tokens had a loss."""
        return int(getattr(self, "_sensitivity_count", 0))

    def configuration(self) -> dict[str, Any]:
        """Return what two statistics have in common that measure the same of a tensor."""
        return {"class": type(self).__qualname__}

    def problem_with(self, fields: Mapping[str, Tensor]) -> str | None:
        """Say why it cannot have these fields, which are sound each, if it cannot."""
        return problem_with_channels("_sensitivity_sum", fields["_sensitivity_sum"])

    def per_token(self) -> Tensor:
        """Return E[(∂L/∂w)²] of each column, for the loss of one token."""
        return self._sensitivity_sum / self.num_tokens
