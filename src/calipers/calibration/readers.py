"""Observers as readers of tensors, which may read together."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from calipers.calibration.sharing import Reader, SharedReading
from calipers.errors import NonFiniteError
from calipers.observers import Observer
from calipers.observers.gathering import GathersInputs
from calipers.statistics.activations import ActivationStatistics


class Watcher(Reader):
    """An observer as a reader of tensors.

    :param dtype: what tensors are rounded to before they are measured; None: nothing
    """

    def __init__(self, observer: Observer, dtype: torch.dtype | None = None) -> None:
        self.observer, self._dtype = observer, dtype

    @cached_property
    def key(self) -> Hashable:
        """The whole configuration."""
        return str(sorted(self.observer.configuration().items())), self._dtype

    @property
    def label(self) -> str:
        """The name of the observer."""
        return self.observer.label()

    def measure(self, tensor: Tensor, mask: Tensor | None) -> None:
        """Observe the tensor."""
        self.observer(_rounded(tensor, self._dtype), mask=mask)

    def copy_from(self, other: Reader) -> None:
        """Take over the fields of another observer."""
        assert isinstance(other, Watcher)
        self.observer.load_fields(other.observer.fields())


class Gatherer(Reader):
    """An observer of a weight as a reader of the inputs of its module.

    :param dtype: what tensors are rounded to before they are measured; None: nothing
    """

    def __init__(self, observer: GathersInputs, dtype: torch.dtype | None = None) -> None:
        self.observer, self._dtype = observer, dtype

    @cached_property
    def key(self) -> Hashable:
        """What is gathered, of what shape, and what becomes of NaN."""
        shapes = tuple((name, value.shape) for name, value in self.observer.gathered().items())
        return shapes, self.observer.options.nonfinite, self._dtype

    @property
    def label(self) -> str:
        """The name of the observer."""
        return self.observer.label()

    def measure(self, tensor: Tensor, mask: Tensor | None) -> None:
        """Add the tensor to the sums."""
        tensor = _rounded(tensor, self._dtype)
        self.observer.gather_input(tensor, mask)
        sums = self.observer.gathered().values()
        if not all(bool(torch.isfinite(value).all()) for value in sums):
            count = int((~torch.isfinite(tensor)).sum())
            raise NonFiniteError(self.label, count, tensor.numel(), tensor.shape)

    def copy_from(self, other: Reader) -> None:
        """Take over the sums of another observer."""
        assert isinstance(other, Gatherer)
        for name, value in other.observer.gathered().items():
            setattr(self.observer, name, value.clone())


class Recorder(Reader):
    """The statistics that costs are worked out from, as a reader of tensors.

    :param dtype: what tensors are rounded to before they are measured; None: nothing
    """

    def __init__(self, statistics: ActivationStatistics, dtype: torch.dtype | None = None) -> None:
        self.statistics, self._dtype = statistics, dtype

    @cached_property
    def key(self) -> Hashable:
        """What is gathered."""
        return str(sorted(self.statistics.configuration().items())), self._dtype

    @property
    def label(self) -> str:
        """The name of the statistics."""
        return self.statistics.label()

    def measure(self, tensor: Tensor, mask: Tensor | None) -> None:
        """Take the tensor in."""
        self.statistics.take(_rounded(tensor, self._dtype), mask)

    def copy_from(self, other: Reader) -> None:
        """Know what another reader knows."""
        assert isinstance(other, Recorder)
        self.statistics.share_fields(other.statistics)


def read(
    module: torch.nn.Module,
    observer: Any,
    reader: type[Watcher] | type[Gatherer] | type[Recorder],
    tensor: Tensor,
    mask: Tensor | None,
) -> None:
    """Measure a tensor, together with others if the module takes part in that."""
    sharing: SharedReading | None = getattr(module, "_shared_reading", None)
    as_reader = partial(reader, dtype=getattr(module, "_observed_dtype", None))
    if sharing is None:
        as_reader(observer).measure(tensor, mask)
    else:
        sharing.read(observer, as_reader, tensor, mask)


def _rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
