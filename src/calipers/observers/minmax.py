"""Observers that take the range a tensor really has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from calipers.observers.base import Observer
from calipers.observers.observation import in_pieces
from calipers.observers.options import MovingAverageOptions, ObserverOptions
from calipers.statistics.base import Reduction
from calipers.statistics.moving_average import MovingAverage


@Observer.register("memoryless_minmax")
class MemorylessMinMaxObserver(Observer):
    """Takes the extrema of the last tensor. The default for weights."""

    remembers = "extrema of the last tensor"
    when = "weights, fast"
    Options = ObserverOptions

    @in_pieces
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Reduce the extrema as the class declares it."""
        low, high = self.extrema(observed)
        self.absorb(min_vals=low, max_vals=high)


@Observer.register("static_minmax")
class StaticMinMaxObserver(MemorylessMinMaxObserver):
    """Takes the extrema of all tensors. The default for static activations."""

    remembers = "extrema of all tensors"
    when = "static activations"
    reductions: ClassVar[Mapping[str, Reduction]] = {
        "min_vals": Reduction.MIN,
        "max_vals": Reduction.MAX,
    }


@Observer.register("minmax")
class MinMaxObserver(MovingAverage, MemorylessMinMaxObserver):
    """Takes a moving average of the extrema of each tensor."""

    remembers = "moving average of extrema"
    when = "static activations whose extremes differ from batch to batch; it clips rare spikes"
    Options = MovingAverageOptions
