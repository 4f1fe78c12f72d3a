"""Observers that take the range a tensor really has."""

from __future__ import annotations

from torch import Tensor

from calipers.observers.base import Observer
from calipers.observers.definition import Definition
from calipers.observers.options import MovingAverageOptions, ObserverOptions
from calipers.observers.pieces import in_pieces
from calipers.statistics.ranges import Extrema, LastRange, MovingAverage


class MemorylessMinMaxObserver(Observer):
    """Takes the extrema of the last tensor. The default for weights."""

    remembers = "extrema of the last tensor"
    when = "weights, fast"
    Options = ObserverOptions
    Range = LastRange
    definition = Definition()

    @in_pieces
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Keep the extrema as the statistic does."""
        low, high = self.extrema(observed)
        self._absorb({"min_vals": low, "max_vals": high})


class StaticMinMaxObserver(MemorylessMinMaxObserver):
    """Takes the extrema of all tensors. The default for static activations."""

    remembers = "extrema of all tensors"
    when = "static activations"
    Range = Extrema
    definition = Definition(Extrema)

    @classmethod
    def keeps_extrema(cls) -> bool:
        """Whether it still looks at tensors as this class does."""
        own = MemorylessMinMaxObserver.update_statistics_from_observed
        return cls.update_statistics_from_observed is own


class MinMaxObserver(MemorylessMinMaxObserver):
    """Takes a moving average of the extrema of each tensor."""

    remembers = "moving average of extrema"
    when = "static activations whose extremes differ from batch to batch; it clips rare spikes"
    Options = MovingAverageOptions
    Range = MovingAverage
    definition = Definition(MovingAverage)
