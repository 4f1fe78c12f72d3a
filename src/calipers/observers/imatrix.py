"""An observer that counts the error of a weight by how strongly its input channel is used."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy
from pydantic import Field
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from calipers.errors import CalipersWarning, ImportanceError, ImportanceUnsupportedError
from calipers.numerics.layout import Layout, strategy_name
from calipers.observers.base import Observer
from calipers.observers.mse import MemorylessMSEObserver
from calipers.observers.options import Grid, Norm, SearchOptions, Shrink
from calipers.statistics.moments import SquareSums

_SUPPORTED = (
    QuantizationStrategy.CHANNEL,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
)


class IMatrixOptions(SearchOptions):
    """Options of a coarse and wide search under importance. Patience 0 tries every candidate."""

    maxshrink: Shrink = 0.95
    grid: Grid = 20.0
    norm: Norm = 3.0
    strict: bool = Field(default=False, description="unusable importance is an error")

    @property
    def steps(self) -> int:
        """At least two candidates, and the last one included."""
        return max(1, super().steps) + 1

    @property
    def stop_after(self) -> int | None:
        """Return the patience, or None for endless."""
        return self.patience or None


@Observer.register("imatrix_mse")
class IMatrixMSEObserver(SquareSums, MemorylessMSEObserver):
    """Weighs the error of each weight by E[x²] of its input channel.

    ``attach`` it to a Linear, run data through the model, ``detach`` it, observe the weight. The
    sums stay on the module for the next observer that is attached there.
    """

    Options = IMatrixOptions
    options: IMatrixOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hook: RemovableHandle | None = None
        self._has_warned = False

    def attach(self, module: torch.nn.Module) -> None:
        """Take over the sums another observer left on ``module``, or start summing its inputs."""
        if hasattr(module, "_imatrix_sum") and not _is_being_summed(module):
            for name in SquareSums.reductions:
                setattr(self, name, getattr(module, name))
                delattr(module, name)
            return
        if not hasattr(module, "in_features"):
            return
        if not hasattr(self, "_imatrix_sum"):
            channels: Any = module.in_features
            self._imatrix_sum = torch.zeros(channels, dtype=torch.float64)
            self._imatrix_count = torch.zeros((), dtype=torch.int64)
        self._remove_hook()
        self._hook = module.register_forward_pre_hook(self._see_input, with_kwargs=True)
        self._publish(module)

    def detach(self, module: torch.nn.Module) -> None:
        """Stop summing, and leave the sums on ``module``."""
        if self._hook is not None and self._hook.id in module._forward_pre_hooks:
            self._remove_hook()
            self._publish(module)

    def importance(self, pieces: Tensor) -> Tensor | None:
        """Return E[x²] of each column over its mean, or None where it cannot be used."""
        try:
            return self._usable_importance(pieces)
        except ImportanceError as error:
            if self.options.strict:
                raise
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"{error.reason} Falls back to plain error.", CalipersWarning, 2)
            return None

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
        importance = self._imatrix_sum / self._imatrix_count
        if importance.numel() != columns:
            raise ImportanceError(
                self.label(),
                f"importance has {importance.numel()} channels for {columns} columns of the weight",
            )
        if not bool(torch.isfinite(importance).all()):
            raise ImportanceError(self.label(), "importance has NaN or Inf in it")
        if bool((importance < 0).any()):
            raise ImportanceError(self.label(), "importance has negative values")
        if not bool(importance.any()):
            raise ImportanceError(self.label(), "importance is zero for every channel")
        return importance / importance.mean()

    def _see_input(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        x = next(iter((*args, *kwargs.values())), None)
        x = x[0] if isinstance(x, tuple) and x else x
        if isinstance(x, Tensor) and x.numel():
            self.absorb_tokens(x)
            self._publish(module)

    def _publish(self, module: torch.nn.Module) -> None:
        for name in SquareSums.reductions:
            setattr(module, name, getattr(self, name))

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def _is_being_summed(module: torch.nn.Module) -> bool:
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(getattr(h, "__self__", None), IMatrixMSEObserver) for h in hooks)
