"""One thread at a time, and full precision: how state is read and written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

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
            if not _is_autocast():
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


def _is_autocast() -> bool:
    return any(map(torch.is_autocast_enabled, _devices()))


@cache
def _devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
