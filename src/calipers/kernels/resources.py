"""What kernels use of a machine: tiles of work, threads, and the memory they leave."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

TILE = 1 << 22  # numbers, where temporaries are what has to stay small
_CACHED = 1 << 20  # what the caches of a CPU hold
_PARALLEL = 1 << 24  # what keeps the cores of other devices busy
_TRIMMED = 1 << 27  # bytes freed before they are given back to the operating system

_of_thread = threading.local()


def tile_for(device: torch.device) -> int:
    """Return how many numbers a device works on best, where the same ones are read many times."""
    return _CACHED if device.type == "cpu" else _PARALLEL


def runs(count: int, each: int = 1, tile: int = TILE) -> Iterator[slice]:
    """Cut ``count`` things of ``each`` numbers into runs of about one tile, at least one thing.

    >>> list(runs(5, each=3, tile=7))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, tile // max(1, each))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def num_threads() -> int:
    """Return how many threads a kernel uses: as many as torch, unless :func:`kernels_only` runs.

    Processes of one job on one machine share its processors, also where torch was not told so.
    """
    reserved: int | None = getattr(_of_thread, "threads", None)
    if reserved is not None:
        return reserved
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    threads = torch.get_num_threads()
    if not processes.isdecimal() or int(processes) < 2:
        return threads
    return max(1, min(threads, _processors() // int(processes)))


def _processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def kernels_only() -> Iterator[None]:
    """Let kernels alone use several threads, and operations of torch one, within this thread.

    For work that is done by kernels: threads of torch that have nothing to do spin for a while, and
    take the processors from those that have.
    """
    before, reserved = torch.get_num_threads(), getattr(_of_thread, "threads", None)
    _of_thread.threads = num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _of_thread.threads = reserved


@contextmanager
def in_threads(work: Callable[[T], R], items: Sequence[T]) -> Iterator[Iterator[R]]:
    """Work on small things beside each other, each in one thread, and give the results in order.

    What Python does for one runs while kernels work on another, and no more threads run than a
    kernel alone would use.

    >>> with in_threads(abs, [-1, 2, -3]) as results:
    ...     list(results)
    [1, 2, 3]
    """
    workers = num_threads()
    if workers == 1 or len(items) < 2:
        yield map(work, items)
        return

    def without_gradients(item: T) -> R:  # each thread has a mode of its own
        with torch.no_grad():
            return work(item)

    with kernels_only():  # torch has one thread meanwhile, and so have kernels in other threads
        pool = ThreadPoolExecutor(workers)
        try:
            yield pool.map(without_gradients, items)
        finally:
            pool.shutdown(cancel_futures=True)


class FreedMemory:
    """Gives freed memory back to the operating system, where the C library keeps it.

    Tensors of one layer after another leave holes between small things that stay; without this a
    process that holds one layer at a time grows by a part of each.
    """

    def __init__(self, most: int = _TRIMMED) -> None:
        self._most, self._size = most, 0

    def count(self, size: int) -> None:
        """Note that work on so many bytes is over; now and then what it left is given back."""
        self._size += size
        if self._size > self._most:
            self._size = 0
            # Without an answer it is not glibc, or it is no C library at all.
            with suppress(OSError, TypeError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)
