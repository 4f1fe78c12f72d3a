"""Statistics inside a model: saved, loaded and moved with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from typing_extensions import Self

from calipers.errors import different_configurations
from calipers.statistics.base import Lock, Reduction, Statistic, guarded


class StatisticModule(Statistic, torch.nn.Module):
    """A module that holds statistics, whose fields are visible as its own.

    It is a statistic itself: of the fields it declares, and of those of its ``parts``. A part is
    given by setting the attribute of that name; one that is new takes the lock of the module.
    A state_dict holds the fields that have data and the configuration they were gathered under,
    all of it as tensors. Casting the model leaves the precision of its statistics alone.
    """

    parts: ClassVar[tuple[str, ...]] = ()
    """The attributes that may hold a statistic."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: Mapping[str, str]  # field → the part that has it
        self._all_declared: Mapping[str, Reduction]
        self._arrange()

    # Parts

    def held(self) -> Iterator[Statistic]:
        """Give the parts that there are."""
        found = (self.__dict__.get(name) for name in self.parts)
        return (part for part in found if isinstance(part, Statistic))

    def declared(self) -> Mapping[str, Reduction]:
        """Return the fields of the module and of its parts, and their reductions."""
        return self._all_declared

    def expected_bytes(self, channels: int, heads: int = 1) -> int:
        """Estimate the memory that its parts take."""
        return sum(part.expected_bytes(channels, heads) for part in self.held())

    def share_lock(self, lock: Lock) -> None:
        """Take a lock that others have too, with all parts that had the one before."""
        before = self.lock
        for each in (self, *self.held()):
            if each.lock is before:
                each.__dict__["_lock"] = lock

    def _arrange(self) -> None:
        """Note which field is where."""
        named = ((name, self.__dict__.get(name)) for name in self.parts)
        kinds = [(name, type(part)) for name, part in named if isinstance(part, Statistic)]
        holders, declared = _arrangement(cast("Any", type(self)), tuple(kinds))
        self.__dict__.update(_holders=holders, _all_declared=declared)

    def _part_with(self, name: str) -> Statistic | None:
        """Return the part that has a field; None for the module's own, and before there are any."""
        own = self.__dict__
        holders = own.get("_holders")
        return None if holders is None else own.get(holders.get(name))

    def __getattr__(self, name: str) -> Any:
        part = self._part_with(name)
        if part is not None and (name in part.__dict__ or name in part.deferred()):
            return getattr(part, name)
        return torch.nn.Module.__getattr__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if value is None and name in self.__dict__.get("_all_declared", ()):
            self.__dict__.setdefault("_none_at_first", set()).add(name)
        part = self._part_with(name)
        if part is not None:
            setattr(part, name, value)
        elif name in self.parts:
            if isinstance(value, Statistic):  # a subclass may use the name for something else
                value.__dict__.setdefault("_lock", self.lock)
            self.__dict__[name] = value
            self._arrange()
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        part = self._part_with(name)
        if part is not None:
            delattr(part, name)
        else:
            super().__delattr__(name)

    # A statistic of all of them

    def field(self, name: str) -> Tensor | None:
        """Return a field, if it holds data."""
        part = self._part_with(name)
        return super().field(name) if part is None else part.field(name)

    def put(self, name: str, value: Tensor) -> None:
        """Set a field, where it is."""
        part = self._part_with(name)
        if part is None:
            setattr(self, name, value)
        else:
            part.put(name, value)

    def combine(self, name: str, mine: Tensor, new: Tensor) -> Tensor:
        """Reduce two values of one field to one, as the part that has it does."""
        part = self._part_with(name)
        if part is None or part.declared()[name] is not self._all_declared[name]:
            return super().combine(name, mine, new)
        return part.combine(name, mine, new)

    @guarded
    def reset(self) -> None:
        """Forget everything; fields that a subclass began as None are None again."""
        for part in self.held():
            part.reset()
        super().reset()
        for name in self.__dict__.get("_none_at_first", ()):
            setattr(self, name, None)

    @guarded
    def fields_to_share(self) -> dict[str, Tensor]:
        """Return the fields for somebody else to keep: none is changed in place afterwards."""
        for part in self.held():
            part.fields_to_share()
        return self.fields()

    def packed(self, name: str, value: Tensor) -> Tensor:
        """Return the form in which a field is saved."""
        part = self._part_with(name)
        return value if part is None else part.packed(name, value)

    def unpacked(self, name: str, saved: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a saved field in the form it is kept in, where it had this shape."""
        part = self._part_with(name)
        if part is None:
            return saved
        part.owner = self.label()
        return part.unpacked(name, saved, shape)

    # In a model

    @guarded
    def get_extra_state(self) -> Tensor:
        """Return the configuration and the shapes of the fields as bytes of JSON."""
        shapes = {name: list(value.shape) for name, value in self.fields().items()}
        text = json.dumps({"configuration": self.configuration(), "fields": shapes})
        return torch.frombuffer(bytearray(text, "utf-8"), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse fields that were gathered under another configuration."""
        saved, own = _read(state)["configuration"], self.configuration()
        # Whether an argument that is not given is there as None depends on compressed-tensors.
        if any(saved.get(name) != own.get(name) for name in {*saved, *own}):
            raise different_configurations(f"load a state into {self.label()}", own, saved)

    @guarded
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self.fields().items():
            destination[prefix + name] = self.packed(name, value)

    @guarded
    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if prefix and not any(key.startswith(prefix) for key in state_dict):
            return  # a checkpoint of the model alone says nothing about its statistics
        saved = {
            name: state_dict[prefix + name]
            for name in self.declared()
            if prefix + name in state_dict
        }
        rest = {key: v for key, v in state_dict.items() if key.removeprefix(prefix) not in saved}
        super()._load_from_state_dict(
            rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        described = _read(state_dict.get(f"{prefix}_extra_state"))["fields"]
        saved = {
            name: self.unpacked(name, value, described.get(name, value.shape))
            for name, value in saved.items()
        }
        missing = [prefix + name for name in described if name not in saved]
        wrong = [
            f"{prefix}{name} was saved with shape {described[name]}."
            for name, value in saved.items()
            if list(value.shape) != described.get(name, list(value.shape))
        ]
        missing_keys.extend(missing)
        error_msgs.extend(wrong)
        if not missing and not wrong:
            self.load_fields(saved)

    @guarded
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        fields = list(self.fields().values())
        if fields:
            self.move(fn(fields[0].new_empty(0)).device)
        return self


@cache
def _arrangement(
    module: type[StatisticModule], kinds: tuple[tuple[str, type[Statistic]], ...]
) -> tuple[Mapping[str, str], Mapping[str, Reduction]]:
    """Return which part has which field, and the reductions of all fields.

    What the class of the module declares of a field wins over its part.
    """
    own = module.all_reductions()
    holders: dict[str, str] = {}
    declared: dict[str, Reduction] = {}
    for name, kind in kinds:
        for field, reduction in kind.all_reductions().items():
            if not hasattr(module, field):
                holders[field] = name
            declared[field] = own.pop(field, reduction)
    return holders, {**declared, **own}


def _read(state: Tensor | None) -> dict[str, Any]:
    if state is None:
        return {"configuration": {}, "fields": {}}
    described: dict[str, Any] = json.loads(bytes(state.cpu().tolist()).decode())
    return described
