"""A tensor that several modules read is measured once."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar, cast

import torch
from torch import Tensor

from calipers.errors import ModelRunError, Option
from calipers.numerics.tensors import tensor_version


class Measuring(Protocol):
    """What is shown tensors: a statistic, or several that are updated together."""

    measures_roundings: ClassVar[bool]

    def configuration(self) -> dict[str, Any]:
        """Return what two have in common that measure the same of a tensor."""

    def label(self) -> str:
        """Return how messages call it."""

    def origin(self) -> Hashable:
        """Return what two have in common that know the same by :meth:`copy_from`."""

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in a tensor; ``mask`` says which tokens count."""

    def copy_from(self, other: Any) -> None:
        """Know what another one of the same configuration knows."""


Shown = TypeVar("Shown", bound=Measuring)


class SharedInputs:
    """Lets one statistic measure for all that have always been shown the same tensors.

    Statistics of one configuration whose first tensor is the same become a group. From then on the
    group waits until all of it have been shown the next tensor, and measures it once. If one is
    shown another tensor, the group parts, each part knowing what it was really shown: the result is
    always what separate statistics would have found.
    """

    def __init__(self) -> None:
        self._readers: dict[int, _Reader] = {}
        self._groups: dict[int, _Group] = {}
        self._latest: dict[Hashable, _Group] = {}
        self._finished: set[int] = set()

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
        owner = id(statistic)
        if owner not in self._readers:
            self._readers[owner] = _Reader(
                statistic, dtype if statistic.measures_roundings else None
            )
        reader = self._readers[owner]
        group = self._groups.get(owner)
        if group is None:
            has_seen_before = owner in self._finished
            latest = None if has_seen_before else self._latest.get(reader.key)
            if latest is not None and latest.measured_only(tensor):
                latest.members.append(reader)
                self._groups[owner] = latest
                return
            group = _Group([reader], count=int(has_seen_before))
            self._groups[owner] = group
        elif group.is_waiting_for_others_than(reader, tensor):
            self._part(group)
            group = self._groups[owner]
        group.arrive(reader, tensor, mask)
        self._latest[reader.key] = group

    def holder(self, statistic: Shown) -> Shown:
        """Return the one of a group that holds what ``statistic`` was shown so far."""
        group = self._groups.get(id(statistic))
        found = statistic if group is None else group.members[0].statistic
        return cast("Shown", found)  # a group has one configuration, hence one class

    def settle(self) -> None:
        """Measure what is waiting: it is shown to nobody else."""
        for group in self._distinct_groups():
            if group.pending is not None:
                self._part(group)
        self._latest.clear()  # the next batch may have another mask

    def finish(self) -> None:
        """Let all statistics know what was measured for them, and forget the groups.

        Those that go on afterwards measure alone: others may have seen something else before.
        """
        self.settle()
        for group in self._distinct_groups():
            for member in group.members[1:]:
                member.copy_from(group.members[0])
        self._finished.update(self._readers)
        self._readers.clear()
        self._groups.clear()

    def _distinct_groups(self) -> list[_Group]:
        return list({id(group): group for group in self._groups.values()}.values())

    def _part(self, group: _Group) -> None:
        """Leave those behind who were not shown the pending tensor."""
        absent = [member for member in group.members if member not in group.arrived]
        if absent:
            present = [member for member in group.members if member in group.arrived]
            for part in (absent, present):
                if part[0] is not group.members[0]:
                    part[0].copy_from(group.members[0])
            rest = _Group(absent, count=group.count)
            group.members = present
            self._groups |= {id(member.statistic): rest for member in absent}
        group.measure()


@dataclass(eq=False)
class _Reader:
    """A statistic, and what tensors are rounded to before it measures them."""

    statistic: Measuring
    dtype: torch.dtype | None

    @cached_property
    def key(self) -> Hashable:
        """What two readers have in common that measure the same of a tensor, and know the same.

        It is first asked for before anything is measured.
        """
        configuration = str(sorted(self.statistic.configuration().items()))
        return configuration, self.dtype, self.statistic.origin()

    def measure(self, tensor: Tensor, mask: Tensor | None) -> None:
        """Take a tensor in."""
        self.statistic.update(rounded(tensor, self.dtype), mask)

    def copy_from(self, other: _Reader) -> None:
        """Know what another reader of the same key knows."""
        self.statistic.copy_from(other.statistic)


@dataclass(eq=False)
class _Group:
    """Readers that know the same; the first of them holds it."""

    members: list[_Reader]
    count: int = 0
    pending: Tensor | None = None
    mask: Tensor | None = None
    version: int = 0
    arrived: set[_Reader] = field(default_factory=set)
    last: weakref.ref[Tensor] | None = None

    def measured_only(self, tensor: Tensor) -> bool:
        """Whether this tensor, and no other, is what the group knows."""
        same = self.last is not None and self.last() is tensor
        same = same and self.version == tensor_version(tensor)
        return same and self.count == 1 and self.pending is None

    def is_waiting_for_others_than(self, reader: _Reader, tensor: Tensor) -> bool:
        if self.pending is None:
            return False
        return self.pending is not tensor or reader in self.arrived

    def arrive(self, reader: _Reader, tensor: Tensor, mask: Tensor | None) -> None:
        if self.pending is None:
            self.pending, self.mask, self.version = tensor, mask, tensor_version(tensor)
        self.arrived.add(reader)
        if len(self.arrived) == len(self.members):
            self.measure()

    def measure(self) -> None:
        assert self.pending is not None
        tensor, self.pending = self.pending, None
        self.arrived = set()
        if tensor_version(tensor) != self.version:
            raise ModelRunError(
                "reads a tensor that other modules read too, and that one of them changes in "
                "place before all have read it: it cannot be measured once for all",
                subject=self.members[0].statistic.label(),
                hint="Pass " + Option("share_inputs", False) + " to measure it for each of them",
            )
        self.members[0].measure(tensor, self.mask)
        self.mask = None
        self.last = weakref.ref(tensor)
        self.count += 1


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


def rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor in a dtype, if one is given and the tensor holds floats."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
