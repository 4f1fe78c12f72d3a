"""Mergeable state: each tensor is declared once, with the reduction that combines two of them.

Reset, merge, synchronisation across ranks, saving, loading and device moves follow from the
declaration; no statistic writes them again. One thread at a time reads or writes it, in full
precision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import cache, wraps
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
)

import torch
from torch import Tensor
from torch import distributed as dist
from typing_extensions import Self

from calipers.errors import DataError, MergeError, different_configurations, listing
from calipers.kernels.reductions import ChannelSummary

P = ParamSpec("P")
R = TypeVar("R")


class Lock(type(threading.RLock())):  # type: ignore[misc]
    """A lock that one thread may take again, and that a copy does not share with its original.

    Copies of objects that have one lock in common have one in common too.
    """

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


class Guarded(Protocol):
    """What has a lock."""

    @property
    def lock(self) -> Lock:
        """The lock to hold while state is read or written."""


Owner = TypeVar("Owner", bound=Guarded)


def guarded(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """Let a method run alone: under the lock of its object, and outside of autocast."""

    @wraps(method)
    def alone(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            if not any(map(torch.is_autocast_enabled, _devices())):
                return method(self, *args, **kwargs)
            with full_precision():
                return method(self, *args, **kwargs)

    return alone


@contextmanager
def full_precision() -> Iterator[None]:
    """Switch off autocast, which would run float32 arithmetic in half precision.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16), full_precision():
    ...     (torch.ones(1, 1) @ torch.ones(1, 1)).dtype
    torch.float32
    """
    with ExitStack() as stack:
        for device in _devices():
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@cache
def _devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class TensorSummary:
    """What was found in tensors of shape (…, channels) whose values are all finite.

    :param tokens: how many of them count, in all
    :param channels: what was found in the channels of each tensor, in the order of the tensors
    """

    def __init__(self, tokens: int, channels: Sequence[ChannelSummary]) -> None:
        ranges = torch.stack([each.extrema for each in channels])
        self.min_vals, self.max_vals = ranges[:, 0].amin(0), ranges[:, 1].amax(0)
        self.square_sums = [each.square_sums for each in channels]
        self.tokens = torch.tensor(tokens, device=ranges.device)
        self.like = ranges.new_empty(0)  # has the dtype, and nothing else


Load: TypeAlias = Callable[[], Tensor]
"""Loads a field; the same tensor to the bit each time."""


class Reduction(Enum):
    """How two values of one field become one. The value says what the field remembers."""

    MIN = "minimum of all data"
    MAX = "maximum of all data"
    SUM = "sum over all data"
    MEAN = "moving average"
    LAST = "last value only"

    @property
    def is_mergeable(self) -> bool:
        """Whether the order of the data does not matter."""
        return self in _COMBINE

    @property
    def is_synced(self) -> bool:
        """Whether ranks reduce the field to a common value."""
        return self is not Reduction.LAST

    def combine(self, mine: Tensor, new: Tensor) -> Tensor:
        """Reduce two values to one; the last one stays where nothing else is declared."""
        return _COMBINE[self](mine, new) if self in _COMBINE else new

    def identity(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the value that changes nothing when reduced with another across ranks."""
        fill: float = {Reduction.MIN: torch.inf, Reduction.MAX: -torch.inf}.get(self, 0)
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            fill = min(max(fill, limits.min), limits.max)
        return torch.full(shape, fill, dtype=dtype, device=device)

    @classmethod
    def of(cls, reduce_op: Any) -> Reduction:
        """Translate a reduction of torch.distributed."""
        return _FROM_REDUCE_OP[reduce_op]


_COMBINE: dict[Reduction, Callable[[Tensor, Tensor], Tensor]] = {
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
    Reduction.SUM: torch.add,
}
_FROM_REDUCE_OP = {
    dist.ReduceOp.MIN: Reduction.MIN,
    dist.ReduceOp.MAX: Reduction.MAX,
    dist.ReduceOp.SUM: Reduction.SUM,
    dist.ReduceOp.AVG: Reduction.MEAN,
}


class Form(Enum):
    """What a field may hold; damaged files are told by it. The value is what messages call it."""

    ANY = "finite"
    COUNT = "one int64, not below zero"
    SUM = "finite float64"
    RANGE = "finite floats"
    DTYPE = "an empty tensor of floats"

    def fits(self, value: Tensor) -> bool:
        """Whether a field may have this value."""
        if self is Form.ANY:
            return bool(torch.isfinite(value).all())
        if self is Form.COUNT:
            return value.dtype == torch.int64 and not value.ndim and int(value) >= 0
        if not value.is_floating_point() or (self is Form.SUM and value.dtype != torch.float64):
            return False
        if self is Form.DTYPE:
            return value.shape == (0,)
        # unlike torch.isfinite, without copies of a large Hessian
        ends = value.aminmax() if value.numel() else ()
        return all(bool(torch.isfinite(end)) for end in ends)


class Statistic:
    """A summary of a stream of tensors, kept in the fields that ``reductions`` declares.

    A field that has no data yet is an absent attribute. Declarations of base classes add up.
    Threads may share a statistic: what reads or writes its fields does so alone.

    A field may be *deferred*: it stays where it is stored, such as in a file, and is loaded each
    time it is read. What reads it drops it afterwards, so that a model's worth of Hessians is never
    in memory at once.

    >>> class Largest(Statistic):
    ...     reductions = {"largest": Reduction.MAX}
    >>> a, b = Largest(), Largest()
    >>> a.absorb(largest=torch.tensor(3.0)); b.absorb(largest=torch.tensor(5.0))
    >>> a.merge(b).largest
    tensor(5.)
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {}
    tokens_field: ClassVar[str] = ""
    """The field that counts tokens."""
    forms: ClassVar[Mapping[str, Form]] = {}
    """What fields may hold, besides that which counts tokens; others anything that is finite."""
    configured_by: ClassVar[tuple[str, ...]] = ()
    """The attributes that two of a class have in common if they measure the same of a tensor: also
    the keywords of its constructor."""
    measures_roundings: ClassVar[bool] = True
    """Whether it matters that a model which computes in a wider dtype would round to its own."""
    owner: str = ""
    """What messages call it, if not by its class: whose tensors it measures."""
    takes_pairs: ClassVar[bool] = False
    """Whether it is shown two tensors side by side: as it was in the model, and as it has become
    by what was quantized before."""

    _declared: ClassVar[Mapping[str, Reduction]]

    @property
    def synced(self) -> dict[str, Tensor]:
        """The fields as the last synchronisation across ranks left them."""
        record: dict[str, Tensor] = self.__dict__.setdefault("_synced", {})
        return record

    @property
    def lock(self) -> Lock:
        """The lock that whoever reads or writes the fields holds."""
        lock: Lock | None = self.__dict__.get("_lock")
        return self.__dict__.setdefault("_lock", Lock()) if lock is None else lock

    def share_lock(self, lock: Lock) -> None:
        """Take a lock that others have too."""
        self.__dict__["_lock"] = lock

    # Deferred fields

    def defer(self, name: str, load: Load) -> None:
        """Let a field be loaded whenever it is read, in place of what it holds."""
        self.__dict__.pop(name, None)
        self.__dict__.setdefault("_deferred", {})[name] = load

    def deferred(self) -> dict[str, Load]:
        """Return the fields that are loaded when they are read, and what loads them."""
        loads: dict[str, Load] = self.__dict__.get("_deferred", {})
        return {name: load for name, load in loads.items() if name not in self.__dict__}

    def loader(self, name: str) -> Load:
        """Return what gives the present value of a field that holds data."""
        load = self.deferred().get(name)
        if load is not None:
            return load
        value: Tensor = getattr(self, name)
        return lambda: value

    if not TYPE_CHECKING:  # or every attribute would count as declared

        def __getattr__(self, name: str) -> Any:
            load = self.__dict__.get("_deferred", {}).get(name)
            if load is None:
                raise AttributeError(f"{type(self).__qualname__!r} has no attribute {name!r}")
            return load()

    def __getstate__(self) -> dict[str, Any]:
        """Let a copy, or a pickle, hold the deferred fields itself."""
        state = self.__dict__.copy()
        for name, load in state.pop("_deferred", {}).items():
            if name not in state:
                state[name] = load()
        return state

    @classmethod
    def all_reductions(cls) -> dict[str, Reduction]:
        """Collect what this class and its bases declare, the nearest winning."""
        collected: dict[str, Reduction] = {}
        for base in reversed(cls.__mro__):
            collected.update(base.__dict__.get("reductions", {}))
        return collected

    def declared(self) -> Mapping[str, Reduction]:
        """Return the fields and their reductions, collected once for each class."""
        known: Mapping[str, Reduction] | None = type(self).__dict__.get("_declared")
        if known is None:
            known = MappingProxyType(self.all_reductions())
            type(self)._declared = known
        return known

    # What a statistic of a stream writes

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in a tensor, in the shape it has in the model; ``mask`` says which tokens count."""
        raise NotImplementedError(f"{type(self).__qualname__} takes in no tensors.")

    @property
    def takes_summaries(self) -> bool:
        """Whether summaries of finite tensors, made for several statistics, are enough for it."""
        return False

    def take(self, summary: TensorSummary) -> None:
        """Take in the tensors of a summary, as ``update`` would, one after the other."""
        raise NotImplementedError(f"{type(self).__qualname__} takes no summaries.")

    def table_for(self, x: Tensor) -> Tensor | None:  # noqa: ARG002
        """Return the table that whoever summarizes ``x`` adds its counts to; None for none."""
        return None

    @property
    def num_tokens(self) -> int:
        """How many tokens were taken in."""
        return int(getattr(self, self.tokens_field, 0))

    def configuration(self) -> dict[str, Any]:
        """Return what two statistics have in common that measure the same of a tensor."""
        settings = {name: getattr(self, name) for name in self.configured_by}
        return {"class": type(self).__qualname__, **settings}

    @classmethod
    def from_configuration(cls, options: Mapping[str, Any]) -> Self:
        """Return an empty statistic of a configuration, which is given without the class."""
        return cls(**options)

    def empty(self) -> Self:
        """Return one of the same configuration and owner that has seen nothing."""
        options = self.configuration()
        del options["class"]
        made = self.from_configuration(options)
        made.owner = self.owner
        return made

    def form_of(self, name: str) -> Form:
        """Return what a field may hold."""
        return Form.COUNT if name == self.tokens_field else self.forms.get(name, Form.ANY)

    def problem_with(self, fields: Mapping[str, Tensor]) -> str | None:  # noqa: ARG002
        """Say why it cannot have these fields, which are sound each, if it cannot."""
        return None

    def expected_bytes(self, channels: int, heads: int = 1) -> int:  # noqa: ARG002
        """Estimate the memory it takes for a tensor of so many channels and, of states, heads."""
        return 2 * 8 * channels

    # What follows from it

    def label(self) -> str:
        """Return how messages call this statistic."""
        return self.owner or type(self).__qualname__

    def fields(self) -> dict[str, Tensor]:
        """Return the fields that hold data."""
        with self.lock:
            held = {name: self.field(name) for name in self.declared()}
        return {name: value for name, value in held.items() if value is not None}

    def field(self, name: str) -> Tensor | None:
        """Return a field, if it holds data."""
        value = getattr(self, name, None)
        return value if isinstance(value, Tensor) else None

    def put(self, name: str, value: Tensor) -> None:
        """Set a field."""
        self.__dict__[name] = value

    def combine(self, name: str, mine: Tensor, new: Tensor) -> Tensor:
        """Reduce two values of one field to one."""
        return self.declared()[name].combine(mine, new)

    @guarded
    def absorb(self, /, **new: Tensor) -> None:
        """Reduce each field with a new value; if their shapes do not agree, none."""
        self._absorb(new)

    def _absorb(self, new: dict[str, Tensor]) -> None:
        """Do so where the lock is held already: to take it again costs small tensors time."""
        known = [(name, mine) for name in new if (mine := self.field(name)) is not None]
        for name, mine in known:
            value = new[name]
            if mine.shape != value.shape and self.declared()[name] is not Reduction.LAST:
                raise DataError(
                    f"has seen tensors with {name} of shape {tuple(mine.shape)}, and now one of "
                    f"shape {tuple(value.shape)}",
                    subject=self.label(),
                    hint="One observer watches one tensor: use another one, or reset() this one",
                )
            new[name] = self.combine(name, mine.to(value.device), value)
        for name, value in new.items():
            self.put(name, value)

    @guarded
    def reset(self) -> None:
        """Forget everything."""
        self.__dict__.pop("_deferred", None)
        for name in self.fields():
            delattr(self, name)
        self.synced.clear()

    def merge(self, other: Self) -> Self:
        """Take in what ``other`` has seen, as if this statistic had seen it itself."""
        if not isinstance(other, Statistic):
            raise MergeError(f"Cannot merge a {type(other).__name__} into {self.label()}")
        ours, theirs = self.configuration(), other.configuration()
        if ours != theirs:
            raise different_configurations(f"merge into {self.label()}", ours, theirs)
        fields = other.copied_fields()  # never both locks at once
        with self.lock:
            held = self.fields()
            forgetful = [
                f"{name} ({reduction.value})"
                for name, reduction in self.declared().items()
                if (name in held or name in fields) and not reduction.is_mergeable
            ]
            if forgetful and held and fields:
                raise MergeError(
                    "cannot merge: what it keeps depends on the order of the data: "
                    f"{listing(forgetful)}",
                    subject=self.label(),
                    hint="Use a statistic with memory of all data, such as 'static_minmax'",
                )
            self.absorb(
                **{k: v.to(held[k].device if k in held else v.device) for k, v in fields.items()}
            )
        return self

    @guarded
    def copied_fields(self) -> dict[str, Tensor]:
        """Return copies of the fields that hold data, all of the same moment."""
        return {name: value.clone() for name, value in self.fields().items()}

    @guarded
    def load_fields(self, fields: Mapping[str, Tensor]) -> None:
        """Replace everything by saved fields."""
        self.reset()
        for name in self.declared():
            if name in fields:
                setattr(self, name, fields[name].detach().clone())

    def copy_from(self, other: Self) -> None:
        """Know what another statistic of the same configuration knows, in place of what is here.

        Tensors are shared until one of the two goes on; deferred fields stay deferred.
        """
        with other.lock:
            fields, deferred = other.fields_to_share(), other.deferred()
        self.replace_fields(fields, deferred)  # never both locks at once

    def origin(self) -> tuple[int, ...]:
        """Return what two statistics have in common that know the same by :meth:`copy_from`."""
        return tuple(map(id, (*self.fields_to_share().values(), *self.deferred().values())))

    def derive_from(self, known: Collection[Statistic]) -> bool:
        """Know what statistics of the same tensor tell of it; False where that is not enough.

        Nothing that was measured with ``nonfinite="raise"`` has NaN or Inf in it, so it is the same
        under any choice.
        """
        mine = self.configuration()
        nonfinite = mine.pop("nonfinite", None)
        for each in known:
            theirs = each.configuration()
            if theirs.pop("nonfinite", "raise") in ("raise", nonfinite) and theirs == mine:
                self.copy_from(each)
                return True
        return False

    @property
    def can_be_divided(self) -> bool:
        """Whether it is known what it would be had each channel been divided by a factor."""
        return False

    def divided_by(self, factors: Tensor) -> Self | None:  # noqa: ARG002
        """Return what it would be had each channel been divided by a factor; None: not known."""
        return None

    def with_fields(self, fields: Mapping[str, Tensor]) -> Self:
        """Return one of the same configuration that holds these fields."""
        options = {k: v for k, v in self.configuration().items() if k != "class"}
        made = self.from_configuration(options)
        made.owner = self.owner
        made.load_fields(fields)
        return made

    def fields_to_share(self) -> dict[str, Tensor]:
        """Return the fields in memory for others to keep: none is changed in place afterwards."""
        with self.lock:
            names = [name for name in self.declared() if name not in self.deferred()]
            held = {name: self.field(name) for name in names}
        return {name: value for name, value in held.items() if value is not None}

    @guarded
    def replace_fields(
        self, fields: Mapping[str, Tensor], deferred: Mapping[str, Load] | None = None
    ) -> None:
        """Hold these tensors themselves, in place of what is here."""
        self.reset()
        for name, value in fields.items():
            setattr(self, name, value)
        for name, load in (deferred or {}).items():
            self.defer(name, load)

    def packed(self, name: str, value: Tensor) -> Tensor:  # noqa: ARG002
        """Return the form in which a field is saved."""
        return value

    def unpacked(self, name: str, saved: Tensor, shape: Sequence[int]) -> Tensor:  # noqa: ARG002
        """Return a saved field in the form it is kept in, where it had this shape."""
        return saved

    @guarded
    def move(self, device: torch.device) -> None:
        """Move the fields to a device; their dtype, hence their precision, stays."""
        for name, value in self.fields().items():
            setattr(self, name, value.to(device))
