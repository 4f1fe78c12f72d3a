"""An observer that counts the error of a weight by how strongly its input channel is used."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from compressed_tensors.quantization import QuantizationStrategy
from torch import Tensor

from calipers.errors import ImportanceError, ImportanceUnsupportedError
from calipers.numerics.layout import Layout, strategy_name
from calipers.observers.base import Observer
from calipers.observers.gathering import GathersInputs, ImportanceOptions
from calipers.observers.mse import MemorylessMSEObserver
from calipers.observers.options import Expand, Grid, Norm, Patience, SearchOptions, Shrink
from calipers.statistics.moments import SquareSums

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


@Observer.register("imatrix_mse")
class IMatrixMSEObserver(GathersInputs, SquareSums, MemorylessMSEObserver):
    """Weighs the error of each weight by E[x²] of its input channel.

    ``attach`` it to a Linear, run data through the model, ``detach`` it, observe the weight. The
    sums stay on the module for the next observer that is attached there.
    """

    remembers = "best shrunk range under importance, Σx² and tokens"
    when = "weights at 4 bits and below"
    Options = IMatrixOptions
    options: IMatrixOptions

    def gathered_fields(self) -> Iterable[str]:
        """Name the sums."""
        return SquareSums.reductions

    def begin_gathering(self, channels: int) -> None:
        """Begin with sums of zero."""
        self._imatrix_sum = torch.zeros(channels, dtype=torch.float64)
        self._imatrix_count = torch.zeros((), dtype=torch.int64)

    def gather(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add the squares of an input."""
        self.absorb_tokens(x, mask)

    def importance(self, pieces: Tensor) -> Tensor | None:
        """Return E[x²] of each column over its mean, or None where it cannot be used."""
        return self.or_plain(self._usable_importance, pieces)

    def _usable_importance(self, pieces: Tensor) -> Tensor | None:
        if self.base_name != "weight" or self.args.strategy not in _SUPPORTED:
            raise ImportanceUnsupportedError(
                self.label(),
                f"importance has no meaning for '{self.base_name}' with strategy "
                f"'{strategy_name(self.args)}' (only for weights: channel, group, tensor_group)",
            )
        layout = self._observation.layout if self._observation else Layout.of("weight", self.args)
        return layout.columns(self._checked_importance(pieces.shape[-3] * pieces.shape[-1]))

    def _checked_importance(self, columns: int) -> Tensor:
        if not int(getattr(self, "_imatrix_count", 0)):
            raise ImportanceError(self.label(), "no importance was gathered")
        return checked_importance(self._imatrix_sum / self._imatrix_count, columns, self.label())


class ExpandedIMatrixOptions(IMatrixOptions):
    """Options of a search under importance from 1.8 down to 0.8 times the observed range."""

    maxshrink: Shrink = 1 - 0.8 / 1.8
    patience: Patience = 1000
    grid: Grid = 200.0
    norm: Norm = 2.4
    expand: Expand = 1.8


@Observer.register("nvfp4_expanded_imatrix")
class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver):
    """Weighs errors by E[x²], and tries wider ranges too, as ``nvfp4_expanded_mse`` does."""

    remembers = "best of wider and narrower ranges under importance, Σx² and tokens"
    when = "weights in NVFP4, as llm-compressor does it"
    Options = ExpandedIMatrixOptions


def checked_importance(importance: Tensor, columns: int, owner: str) -> Tensor:
    """Return importance over its mean; refuse what cannot be one."""
    if importance.numel() != columns:
        raise ImportanceError(
            owner,
            f"importance has {importance.numel()} channels for {columns} columns of the weight",
        )
    if not bool(torch.isfinite(importance).all()):
        raise ImportanceError(owner, "importance has NaN or Inf in it")
    if bool((importance < 0).any()):
        raise ImportanceError(owner, "importance has negative values")
    if not bool(importance.any()):
        raise ImportanceError(owner, "importance is zero for every channel")
    return importance / importance.mean()
