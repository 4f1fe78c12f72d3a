"""A tensor that several modules read is measured once."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from calipers.errors import ModelRunError, Option
from calipers.numerics.qparams import ActivationQuantizer
from calipers.numerics.tensors import tensor_version
from calipers.statistics.base import Statistic
from calipers.statistics.tensor_statistics import TensorStatistics

Measuring: TypeAlias = Statistic | TensorStatistics
"""What is shown tensors: a statistic, or several that are updated together."""

Shown = TypeVar("Shown", Statistic, TensorStatistics)


class SharedInputs:
    """Lets one statistic measure for all that have always been shown the same tensors.

    Statistics of one configuration whose first tensor is the same become a group. From then on the
    group waits until all of it have been shown the next tensor, and measures it once. If one is
    shown another tensor, the group parts, each part knowing what it was really shown: the result is
    always what separate statistics would have found.

    :param share: whether there are groups of more than one
    """

    def __init__(self, *, share: bool = True) -> None:
        self._share = share
        self._groups: dict[Measuring, _Group] = {}
        self._latest: dict[Hashable, _Group] = {}
        self._finished: weakref.WeakSet[Measuring] = weakref.WeakSet()

    def show(
        self,
        statistic: Measuring,
        tensor: Tensor,
        mask: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Show a tensor to a statistic.

        :param mask: which tokens count; None for all
        :param dtype: what the tensor is rounded to before it is measured; None: nothing
        """
        group = self._groups.get(statistic)
        if group is None:
            has_seen_before = statistic in self._finished
            dtype = dtype if statistic.measures_roundings else None
            # What two have in common that measure the same of a tensor, and know the same.
            key = str(sorted(statistic.configuration().items())), dtype, statistic.origin()
            latest = self._latest.get(key) if self._share and not has_seen_before else None
            if latest is not None and latest.measured_only(tensor):
                latest.members.append(statistic)
                self._groups[statistic] = latest
                return
            group = _Group(key, dtype, [statistic], count=int(has_seen_before))
            self._groups[statistic] = group
        elif group.pending is not None and (
            group.pending is not tensor or statistic in group.arrived
        ):
            self._part(group)
            group = self._groups[statistic]
        if group.pending is None:
            group.pending, group.mask, group.version = tensor, mask, tensor_version(tensor)
        group.arrived.add(statistic)
        if len(group.arrived) == len(group.members):
            group.measure()
        self._latest[group.key] = group

    def holder(self, statistic: Shown) -> Shown:
        """Return the one of a group that holds what ``statistic`` was shown so far."""
        group = self._groups.get(statistic)
        holder: Shown = statistic if group is None else group.members[0]
        return holder

    def settle(self) -> None:
        """Measure what is waiting: it is shown to nobody else."""
        for group in dict.fromkeys(self._groups.values()):
            if group.pending is not None:
                self._part(group)
        self._latest.clear()  # the next batch may have another mask

    def finish(self) -> None:
        """Let all statistics know what was measured for them, and forget the groups.

        Those that go on afterwards measure alone: others may have seen something else before.
        """
        self.settle()
        for group in dict.fromkeys(self._groups.values()):
            for member in group.members[1:]:
                member.copy_from(group.members[0])
        self._finished.update(self._groups)
        self._groups.clear()

    def _part(self, group: _Group) -> None:
        """Leave those behind who were not shown the pending tensor."""
        absent = [member for member in group.members if member not in group.arrived]
        if absent:
            present = [member for member in group.members if member in group.arrived]
            for part in (absent, present):
                if part[0] is not group.members[0]:
                    part[0].copy_from(group.members[0])
            rest = _Group(group.key, group.dtype, absent, count=group.count)
            group.members = present
            self._groups |= dict.fromkeys(absent, rest)
        group.measure()


@dataclass(eq=False)
class _Group:
    """Statistics that know the same; the first of them holds it.

    :param members: all of one configuration, hence of one class
    :param dtype: what tensors are rounded to before they are measured
    """

    key: Hashable
    dtype: torch.dtype | None
    members: list[Any]
    count: int = 0
    pending: Tensor | None = None
    mask: Tensor | None = None
    version: int = 0
    arrived: set[Measuring] = field(default_factory=set)
    last: weakref.ref[Tensor] | None = None

    def measured_only(self, tensor: Tensor) -> bool:
        """Whether this tensor, and no other, is what the group knows."""
        same = self.last is not None and self.last() is tensor
        same = same and self.version == tensor_version(tensor)
        return same and self.count == 1 and self.pending is None

    def measure(self) -> None:
        """Measure the pending tensor, once for all members."""
        assert self.pending is not None
        tensor, self.pending = self.pending, None
        self.arrived = set()
        if tensor_version(tensor) != self.version:
            raise ModelRunError(
                "reads a tensor that other modules read too, and that one of them changes in "
                "place before all have read it: it cannot be measured once for all",
                subject=self.members[0].label(),
                hint="Pass " + Option("share_inputs", False) + " to measure it for each of them",
            )
        is_rounded = self.dtype is not None and tensor.is_floating_point()
        self.members[0].update(tensor.to(self.dtype) if is_rounded else tensor, self.mask)
        self.mask = None
        self.last = weakref.ref(tensor)
        self.count += 1


class QuantizedInputs:
    """The inputs of modules as their kernels see them: one tensor for all that quantize alike."""

    def __init__(self) -> None:
        self.quantizers: dict[str, ActivationQuantizer] = {}
        self._results: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """Return the input of a module after quantization; as it is, where that is not known."""
        quantize = self.quantizers.get(name)
        if quantize is None:
            return tensor
        # Static parameters are a module's own; dynamic ones follow from the value.
        key = id(tensor), tensor_version(tensor), id(quantize.args), id(quantize.qparams)
        if key not in self._results:  # which also keeps the tensor, hence its id
            self._results[key] = tensor, quantize(tensor)
        return self._results[key][1]

    def clear(self) -> None:
        """Forget the tensors: the batch has run."""
        self._results.clear()


class PairedTensors:
    """The inputs of modules in two runs of one batch, side by side."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[Tensor, int]] = {}
        self._changes: dict[str, Tensor] = {}
        self._joined: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def keep(self, name: str, tensor: Tensor) -> None:
        """Keep what a module saw in the first run."""
        self._before[name] = tensor, tensor_version(tensor)

    def note_change(self, name: str, tensor: Tensor) -> None:
        """Note what a module saw more in the first run than in the second."""
        self._changes[name] = self._kept(name) - tensor

    def of(self, name: str, tensor: Tensor, residual: str | None = None) -> Tensor:
        """Return what a module saw in both runs, (…, 2 × channels): one tensor for all readers.

        :param residual: the module whose noted change stands behind both; None: nothing does
        """
        before = self._kept(name)
        key = id(before), id(tensor)
        if key not in self._joined:  # which also keeps the tensor, hence its id
            behind = [] if residual is None else [self._changes[residual]]
            self._joined[key] = tensor, torch.cat([before, tensor, *behind], -1)
        return self._joined[key][1]

    def clear(self) -> None:
        """Forget everything: the batch has run."""
        self._before.clear()
        self._changes.clear()
        self._joined.clear()

    def _kept(self, name: str) -> Tensor:
        before, version = self._before[name]
        if tensor_version(before) != version:
            raise ModelRunError(
                "reads a tensor that is changed in place later in the model: it cannot be compared "
                "with what it becomes when layers before it are quantized",
                subject=name,
                hint="Give the recipe 'error_propagation: quantized'",
            )
        return before
