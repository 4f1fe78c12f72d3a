"""Observers that shrink the range to where the quantization error is least."""

from __future__ import annotations

from torch import Tensor

from calipers.observers.base import Observer
from calipers.observers.definition import Definition
from calipers.observers.options import (
    Expand,
    Grid,
    MovingAverageSearchOptions,
    Patience,
    SearchOptions,
    Shrink,
)
from calipers.observers.pieces import in_pieces
from calipers.solvers.grid_search import best_range
from calipers.solvers.problem import Problem
from calipers.statistics.ranges import MovingAverage


def searched_range(problem: Problem, options: SearchOptions) -> tuple[Tensor, Tensor]:
    """Return the best of the shrunk ranges of one tensor."""
    return best_range(problem._replace(norm=options.norm), options.tried)


class MemorylessMSEObserver(Observer):
    """Takes the best of the shrunk ranges of the last tensor."""

    remembers = "best shrunk range of the last tensor"
    when = "weights"
    Options = SearchOptions
    options: SearchOptions
    definition = Definition(search=searched_range)

    @in_pieces
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Search, and reduce what was found as the class declares it."""
        low, high = self.extrema(observed)
        pieces = self.pieces(observed)
        weights = self.weights(pieces)
        problem = Problem(pieces, low, high, self.args, weights=weights)
        low, high = searched_range(problem, self.options)
        self.absorb(min_vals=low, max_vals=high)


class MovingAverageMSEObserver(MemorylessMSEObserver):
    """Takes a moving average of the best ranges of each tensor."""

    remembers = "moving average of the best shrunk ranges"
    when = "activations"
    Options = MovingAverageSearchOptions
    Range = MovingAverage
    definition = Definition(MovingAverage, searched_range)


class ExpandedSearchOptions(SearchOptions):
    """Options of a search that starts beyond the observed range: from 1.8 down to 0.8 times it."""

    maxshrink: Shrink = 1 - 0.8 / 1.8
    patience: Patience = 1000
    grid: Grid = 200.0
    expand: Expand = 1.8


class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """Tries wider ranges too: fp4 is so coarse that its largest code may be better left unused.

    To leave out the code 6, so that 4 is the largest, is to widen the range by half: one of the
    candidates. llm-compressor calls this observer ``fouroversix`` too, and so may recipes here.
    """

    remembers = "best of wider and narrower ranges"
    when = "weights in NVFP4"
    Options = ExpandedSearchOptions
    definition = Definition(search=searched_range)
