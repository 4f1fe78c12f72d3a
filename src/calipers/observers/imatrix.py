"""An observer that counts the error of a weight by how strongly its input channel is used."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import Tensor

from calipers.errors import ImportanceUnsupportedError
from calipers.numerics.layout import strategy_name
from calipers.observers.definition import Definition
from calipers.observers.mse import MemorylessMSEObserver, searched_range
from calipers.observers.options import (
    Expand,
    Grid,
    ImportanceOptions,
    Norm,
    ObserverOptions,
    Patience,
    SearchOptions,
    Shrink,
)
from calipers.solvers.importance import Weights

_SUPPORTED = (
    QuantizationStrategy.CHANNEL,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
)


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


def check_importance(base_name: str, args: QuantizationArgs, label: str) -> None:
    """Refuse importance for anything but weights whose pieces are of one row."""
    if base_name != "weight" or args.strategy not in _SUPPORTED:
        raise ImportanceUnsupportedError(
            f"importance has no meaning for '{base_name}' with strategy "
            f"'{strategy_name(args)}' (only for weights: channel, group, tensor_group)",
            where=label,
        )


_DEFINITION = Definition(
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
    definition = _DEFINITION

    @classmethod
    def importance_name(cls, options: ObserverOptions) -> str:  # noqa: ARG003
        """Return the name of the importance by which the errors of a weight are counted."""
        return "imatrix"

    def possible_weights(self, pieces: Tensor, least: float = 0.0) -> Weights:
        """Return E[x²] of each column over its mean; refuse pieces of more than one row."""
        check_importance(self.base_name, self.args, self.label())
        return super().possible_weights(pieces, least)


class ExpandedIMatrixOptions(IMatrixOptions):
    """Options of a search under importance from 1.8 down to 0.8 times the observed range."""

    maxshrink: Shrink = 1 - 0.8 / 1.8
    patience: Patience = 1000
    grid: Grid = 200.0
    norm: Norm = 2.4
    expand: Expand = 1.8


class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver):
    """Weighs errors by E[x²], and tries wider ranges too, as ``nvfp4_expanded_mse`` does."""

    remembers = "best of wider and narrower ranges under importance, Σx² and tokens"
    when = "weights in NVFP4, as llm-compressor does it"
    Options = ExpandedIMatrixOptions
    definition = _DEFINITION
