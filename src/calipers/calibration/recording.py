"""What is gathered, beside what observers need, to tell what quantization costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

import torch
from compressed_tensors.modeling import (
    register_key_hook,
    register_query_hook,
    register_value_hook,
)
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from calipers.calibration.lifecycle import OBSERVED, first_tensor
from calipers.calibration.masks import mask_for
from calipers.calibration.output_errors import Streams
from calipers.calibration.plan import PlannedModule
from calipers.calibration.readers import Recorder, read
from calipers.errors import MaskShapeError
from calipers.observers import Observer
from calipers.observers.gathering import gathers
from calipers.statistics.activations import ActivationStatistics
from calipers.statistics.base import Statistic
from calipers.statistics.value_counts import ValueCounts

_COUNTED = ("tensor", "attn_head")
Observers = Mapping[tuple[str, str], Observer]
"""(module, tensor) → who watches it."""


class CostRecording:
    """Statistics of the tensors of modules, from which costs are worked out.

    What an observer gathers anyhow is taken from it: the counts of ``histogram_mse``, the sums of
    ``optimal``.

    :param observers: those of the model that is watched
    """

    def __init__(self, observers: Observers) -> None:
        self._observers = observers
        self._recorded: dict[tuple[str, str], ActivationStatistics] = {}

    def attach(self, planned: PlannedModule, module: torch.nn.Module) -> list[RemovableHandle]:
        """Record what goes through a module from now on, as far as no observer does it."""
        counted = {
            tensor.base_name: tensor.args
            for tensor in planned.tensors
            if tensor.strategy in _COUNTED and self._counts_nothing(planned.name, tensor.base_name)
        }
        squares: dict[str, Literal["channel", "token"]] = {}
        if planned.kind == "linear" and hasattr(module, "in_features"):
            squares = {"input": "channel", "output": "token"}
            if gathers(self._observers.get((planned.name, "weight"))):
                del squares["input"]
        handles = []
        for base_name in (name for name in OBSERVED if name in {*counted, *squares}):
            seen = ActivationStatistics(
                base_name, squares=squares.get(base_name), counted=counted.get(base_name)
            )
            self._recorded[planned.name, base_name] = seen
            handles.append(_register(module, base_name, seen))
        return handles

    def statistics(self, names: Iterable[str]) -> list[Statistic]:
        """Return what was recorded of some modules."""
        wanted = set(names)
        return [seen for (name, _), seen in self._recorded.items() if name in wanted]

    def counts(self, name: str, base_name: str) -> tuple[ValueCounts, bool] | None:
        """Return how often each value of a tensor occurred, and whether that is exact."""
        observer = self._observers.get((name, base_name))
        if isinstance(observer, ValueCounts):
            known = observer.has_statistics
            return (observer, observer.observed_like.dtype.itemsize == 2) if known else None
        seen = self._recorded.get((name, base_name))
        return (seen, seen.is_exact) if seen is not None and seen.has_counts else None

    def streams(self, name: str) -> Streams | None:
        """Return what went through a Linear module; None if nothing did."""
        observer = self._observers.get((name, "weight"))
        inputs = observer if gathers(observer) else self._recorded.get((name, "input"))
        return Streams.of(inputs, self._recorded.get((name, "output")))

    def forget(self, names: Iterable[str]) -> None:
        """Let go of what was recorded of some modules."""
        for seen in self.statistics(names):
            seen.reset()

    def _counts_nothing(self, name: str, base_name: str) -> bool:
        """Whether a tensor is a static activation whose observer keeps no counts."""
        observer = self._observers.get((name, base_name))
        is_static = base_name != "weight" and observer is not None
        return is_static and not isinstance(observer, ValueCounts)


def _register(
    module: torch.nn.Module, base_name: str, seen: ActivationStatistics
) -> RemovableHandle:
    """Register the hook that shows a tensor to its statistics."""
    show = partial(_show, seen, base_name)
    if base_name == "input":
        return module.register_forward_pre_hook(
            lambda m, args, kwargs: show(m, (args, kwargs)), with_kwargs=True
        )
    if base_name == "output":
        return module.register_forward_hook(lambda m, _args, output: show(m, output))
    register = {"q": register_query_hook, "k": register_key_hook, "v": register_value_hook}
    handle: RemovableHandle = register[base_name](module, show)
    return handle


def _show(seen: ActivationStatistics, base_name: str, module: torch.nn.Module, value: Any) -> None:
    tensor = first_tensor(value)
    if tensor is None or not _is_countable(tensor):
        return
    try:
        mask = mask_for(tensor, base_name, seen.label())
    except MaskShapeError:  # whoever needs this tensor refuses it; costs do without
        return
    read(module, seen, Recorder, tensor, mask)


def _is_countable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel() > 0
