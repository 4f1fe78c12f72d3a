"""An observer that leaves some room beyond what it has seen."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from calipers.observers import Observer
from calipers.observers.options import ObserverOptions
from calipers.statistics.base import Reduction


class HeadroomOptions(ObserverOptions):
    """How much room is left."""

    headroom: float = Field(default=1.1, ge=1, description="factor on the extrema")


class HeadroomObserver(Observer):
    """Takes the extrema of all tensors and leaves some room."""

    remembers = "extrema of all tensors"
    when = "static activations whose calibration data is milder than what comes later"
    Options = HeadroomOptions
    options: HeadroomOptions
    reductions: ClassVar = {"min_vals": Reduction.MIN, "max_vals": Reduction.MAX}

    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Reduce the extrema with those before."""
        low, high = self.extrema(observed)
        factor = self.options.headroom
        self.absorb(min_vals=low * factor, max_vals=high * factor)
