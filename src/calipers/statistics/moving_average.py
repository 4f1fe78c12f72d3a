"""A range that follows a stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from calipers.statistics.base import Reduction, Statistic


class MovingAverage(Statistic):
    """Averages ranges with exponentially falling weights; the first one is taken whole.

    What it keeps depends on the order of the batches, so it cannot merge. Ranks average theirs.
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "min_vals": Reduction.MEAN,
        "max_vals": Reduction.MEAN,
    }
    averaging_constant: float

    @property
    def avg_constant(self) -> float:
        """What the field's code calls the averaging constant."""
        return self.averaging_constant

    @avg_constant.setter
    def avg_constant(self, value: float) -> None:
        self.averaging_constant = value

    def combine(self, name: str, mine: Tensor, new: Tensor) -> Tensor:
        """Move an averaged field towards its new value, in float32 or better."""
        if self.declared()[name] is not Reduction.MEAN:
            return super().combine(name, mine, new)
        precise = torch.promote_types(new.dtype, torch.float32)
        weight = self.averaging_constant
        return mine.to(precise) * (1 - weight) + new.to(precise) * weight
