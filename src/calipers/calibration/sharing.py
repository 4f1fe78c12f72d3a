"""A tensor that several modules read is measured once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from calipers.errors import ChangedInputError


class Reader(Protocol):
    """Somebody who measures tensors.

    :param observer: for whom it does
    """

    observer: Any

    @property
    def key(self) -> Hashable:
        """What two readers have in common that measure the same of a tensor."""

    @property
    def label(self) -> str:
        """How messages call the reader."""

    def measure(self, tensor: Tensor, mask: Tensor | None) -> None:
        """Take a tensor into what is known."""

    def copy_from(self, other: Reader) -> None:
        """Know what another reader of the same key knows."""


class SharedReading:
    """Lets one reader measure for all that have always read the same tensors.

    Readers of one key whose first tensor is the same become a group. From then on the group waits
    until all of it have come with the next tensor, and measures it once. If one comes with another
    tensor, the group parts, each part knowing what it has really read: the result is always what
    separate readers would have found.
    """

    def __init__(self) -> None:
        self._readers: dict[Any, Reader] = {}
        self._groups: dict[int, _Group] = {}
        self._latest: dict[Hashable, _Group] = {}
        self._knowing: set[Any] = set()

    def read(
        self, owner: Any, as_reader: Callable[[Any], Reader], tensor: Tensor, mask: Tensor | None
    ) -> None:
        """Note that ``owner``, which measures by the reader made of it, reads ``tensor``."""
        if owner not in self._readers:
            self._readers[owner] = as_reader(owner)
        reader = self._readers[owner]
        group = self._groups.get(id(reader))
        if group is None:
            latest = None if owner in self._knowing else self._latest.get(reader.key)
            if latest is not None and latest.measured_only(tensor):
                latest.members.append(reader)
                self._groups[id(reader)] = latest
                return
            group = _Group([reader], count=1 if owner in self._knowing else 0)
            self._groups[id(reader)] = group
        elif group.is_waiting_for_others_than(reader, tensor):
            self._part(group)
            group = self._groups[id(reader)]
        group.arrive(reader, tensor, mask)
        self._latest[reader.key] = group

    def holder(self, owner: Any) -> Any:
        """Return the one of a group that holds what ``owner`` has read so far."""
        reader = self._readers.get(owner)
        return owner if reader is None else self._groups[id(reader)].members[0].observer

    def settle(self) -> None:
        """Measure what is waiting: no more readers of it will come."""
        for group in {id(group): group for group in self._groups.values()}.values():
            if group.pending is not None:
                self._part(group)
        self._latest.clear()  # the next batch may have another mask

    def finish(self) -> None:
        """Let all readers know what was measured for them, and forget the groups.

        Who goes on reading afterwards reads alone: others may have known something else before.
        """
        self.settle()
        for group in {id(group): group for group in self._groups.values()}.values():
            for member in group.members[1:]:
                member.copy_from(group.members[0])
        self._knowing.update(self._readers)
        self._readers.clear()
        self._groups.clear()

    def _part(self, group: _Group) -> None:
        """Leave those behind who did not read the pending tensor."""
        absent = [member for member in group.members if id(member) not in group.arrived]
        if absent:
            if group.members[0] is not absent[0]:
                absent[0].copy_from(group.members[0])
            rest = _Group(absent, count=group.count)
            present = [member for member in group.members if id(member) in group.arrived]
            if group.members[0] is not present[0]:
                present[0].copy_from(group.members[0])
            group.members = present
            self._groups |= {id(member): rest for member in absent}
        group.measure()


@dataclass(eq=False)
class _Group:
    """Readers that know the same; the first of them holds it."""

    members: list[Reader]
    count: int = 0
    pending: Tensor | None = None
    mask: Tensor | None = None
    version: int = 0
    arrived: set[int] = field(default_factory=set)
    last: weakref.ref[Tensor] | None = None

    def measured_only(self, tensor: Tensor) -> bool:
        """Whether this tensor, and no other, is what the group knows."""
        same = self.last is not None and self.last() is tensor and self.version == version(tensor)
        return same and self.count == 1 and self.pending is None

    def is_waiting_for_others_than(self, reader: Reader, tensor: Tensor) -> bool:
        if self.pending is None:
            return False
        return self.pending is not tensor or id(reader) in self.arrived

    def arrive(self, reader: Reader, tensor: Tensor, mask: Tensor | None) -> None:
        if self.pending is None:
            self.pending, self.mask, self.version = tensor, mask, version(tensor)
        self.arrived.add(id(reader))
        if len(self.arrived) == len(self.members):
            self.measure()

    def measure(self) -> None:
        assert self.pending is not None
        tensor, self.pending = self.pending, None
        self.arrived = set()
        if version(tensor) != self.version:
            raise ChangedInputError(self.members[0].label)
        self.members[0].measure(tensor, self.mask)
        self.mask = None
        self.last = weakref.ref(tensor)
        self.count += 1


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors do not tell."""
    return 0 if tensor.is_inference() else tensor._version
