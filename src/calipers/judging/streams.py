"""What goes through a Linear module: the energies that its errors are weighed by."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.reductions import sum_of_products, sum_of_squares
from calipers.statistics.base import Statistic
from calipers.statistics.sums import BlockHessians, SquareSums, TokenSquares


class Streams(NamedTuple):
    """What went through a module, on average over tokens.

    :param energies: E[x²] of each input channel
    :param blocks: E[x xᵀ] of blocks of channels, if that was gathered
    :param output: E‖y‖²; where outputs were not measured, what inputs and weight tell of it
    """

    energies: Tensor
    blocks: Tensor | None
    output: float

    @classmethod
    def of(
        cls, inputs: Statistic | None, outputs: Statistic | None, weight: Tensor
    ) -> Streams | None:
        """Read statistics of inputs and outputs; None where there is nothing to be read."""
        before, after = _moments(inputs), _moments(outputs)
        if before is None:
            return None
        energies, blocks = before
        streams = cls(energies, blocks, math.nan)
        total = streams.energy_through(weight) if after is None else float(after[0].sum())
        sound = bool(torch.isfinite(energies).all()) and 0 < total < math.inf
        return streams._replace(output=total) if sound else None

    def energy_through(self, matrix: Tensor) -> float:
        """Return E‖M x‖² of a matrix M.

        With the whole of E[x xᵀ] that is exact. With blocks of it, or its diagonal alone, what
        channels of different blocks have in common is left out: it averages out where M is an error
        of rounding, whose entries are independent with a mean of about zero.
        """
        if self.blocks is None:
            return float((sum_of_squares(matrix).cpu() * self.energies).sum())
        # tr(M H Mᵀ) = Σ H ∘ MᵀM, which takes half the products
        parts = torch.split(matrix, self.blocks.shape[-1], dim=1)
        pairs = zip(self.blocks, parts, strict=True)
        return sum(float((sum_of_products(part).cpu() * block).sum()) for block, part in pairs)


def _moments(seen: Statistic | None) -> tuple[Tensor, Tensor | None] | None:
    """Return E[x²] of each channel and, where they were gathered, blocks of E[x xᵀ]."""
    held = {} if seen is None else seen.fields()
    for kind in (SquareSums, BlockHessians, TokenSquares):
        sums, count = kind.reductions
        if sums in held and count in held and int(held[count]):
            mean = held[sums].double().cpu() / int(held[count])
            is_diagonal = mean.ndim == 1
            return (mean, None) if is_diagonal else (mean.diagonal(0, -2, -1).flatten(), mean)
    return None
