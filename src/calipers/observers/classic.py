"""The classic observers: extrema, searched ranges, and searches under importance."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy

from calipers.errors import ImportanceUnsupportedError
from calipers.kernels.search import RangeSearch, search_range
from calipers.numerics.layout import strategy_name
from calipers.observers.base import Observer
from calipers.observers.definition import Definition, Range
from calipers.observers.options import (
    Expand,
    Grid,
    ImportanceOptions,
    MovingAverageOptions,
    MovingAverageSearchOptions,
    Norm,
    ObserverOptions,
    Patience,
    SearchOptions,
    Shrink,
)
from calipers.solvers.scales import Problem
from calipers.statistics.ranges import Extrema, MovingAverage

# Extrema


class MemorylessMinMaxObserver(Observer):
    """Takes the extrema of the last tensor. The default for weights."""

    remembers = "extrema of the last tensor"
    when = "weights, fast"
    Options = ObserverOptions
    definition = Definition(ignores=("averaging_constant",))


class StaticMinMaxObserver(MemorylessMinMaxObserver):
    """Takes the extrema of all tensors. The default for static activations."""

    remembers = "extrema of all tensors"
    when = "static activations"
    definition = Definition(Extrema, for_weights=MemorylessMinMaxObserver)


class MinMaxObserver(MemorylessMinMaxObserver):
    """Takes a moving average of the extrema of each tensor."""

    remembers = "moving average of extrema"
    when = "static activations whose extremes differ from batch to batch; it clips rare spikes"
    Options = MovingAverageOptions
    definition = Definition(MovingAverage, for_weights=MemorylessMinMaxObserver)


# Searched ranges


def searched_range(problem: Problem, options: SearchOptions) -> Range:
    """Return the best of the shrunk ranges of one tensor."""
    weights = problem.weights.diagonal  # of a row of a weight: a piece is a run of its columns
    return search_range(
        RangeSearch(
            *(problem.pieces, problem.low, problem.high, problem.args),
            factors=options.factors,
            norm=options.norm,
            expand=options.expand,
            patience=options.stop_after,
            weights=None if weights is None else weights.reshape(-1, weights.shape[-1]),
        )
    )


class MemorylessMSEObserver(Observer):
    """Takes the best of the shrunk ranges of the last tensor."""

    remembers = "best shrunk range of the last tensor"
    when = "weights"
    Options = SearchOptions
    options: SearchOptions
    definition = Definition(search=searched_range, ignores=("averaging_constant",))


class MovingAverageMSEObserver(MemorylessMSEObserver):
    """Takes a moving average of the best ranges of each tensor."""

    remembers = "moving average of the best shrunk ranges"
    when = "activations"
    Options = MovingAverageSearchOptions
    definition = Definition(MovingAverage, searched_range, for_weights=MemorylessMSEObserver)


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


# Searches under importance


class IMatrixOptions(SearchOptions, ImportanceOptions):
    """Options of a coarse and wide search under importance. Patience 0 tries every candidate."""

    maxshrink: Shrink = 0.95
    grid: Grid = 20.0
    norm: Norm = 3.0

    @property
    def steps(self) -> int:
        """At least two candidates, and the last one included."""
        return max(1, super().steps) + 1

    @property
    def stop_after(self) -> int | None:
        """Return the patience, or None for endless."""
        return self.patience or None


class ExpandedIMatrixOptions(IMatrixOptions):
    """Options of a search under importance from 1.8 down to 0.8 times the observed range."""

    maxshrink: Shrink = 1 - 0.8 / 1.8
    patience: Patience = 1000
    grid: Grid = 200.0
    norm: Norm = 2.4
    expand: Expand = 1.8


def check_importance(base_name: str, args: QuantizationArgs, label: str) -> None:
    """Refuse importance for anything but weights whose pieces are of one row."""
    strategies = QuantizationStrategy
    supported = (strategies.CHANNEL, strategies.GROUP, strategies.TENSOR_GROUP)
    if base_name != "weight" or args.strategy not in supported:
        raise ImportanceUnsupportedError(
            f"importance has no meaning for '{base_name}' with strategy "
            f"'{strategy_name(args)}' (only for weights: channel, group, tensor_group)",
            where=label,
        )


_UNDER_IMPORTANCE = Definition(
    search=searched_range, check_importance=check_importance, is_of_weights=True
)


class IMatrixMSEObserver(MemorylessMSEObserver):
    """Weighs the error of each weight by E[x²] of its input channel.

    ``attach`` it to a Linear, run data through the model, ``detach`` it, observe the weight. The
    sums stay on the module for the next observer that is attached there.
    """

    remembers = "best shrunk range under importance, Σx² and tokens"
    when = "weights at 4 bits and below"
    gathers_inputs = True
    Options = IMatrixOptions
    options: IMatrixOptions
    usual_importance = "imatrix"
    definition = _UNDER_IMPORTANCE


class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver):
    """Weighs errors by E[x²], and tries wider ranges too, as ``nvfp4_expanded_mse`` does."""

    remembers = "best of wider and narrower ranges under importance, Σx² and tokens"
    when = "weights in NVFP4, as llm-compressor does it"
    Options = ExpandedIMatrixOptions
    definition = _UNDER_IMPORTANCE
