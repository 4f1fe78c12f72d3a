"""How many threads kernels use, and who else may run meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

_told = threading.local()


def num_threads() -> int:
    """Return how many threads a kernel uses: as many as torch, if nobody has told otherwise.

    Processes of one job on one machine share its processors, also where torch was not told so.
    """
    told: int | None = getattr(_told, "threads", None)
    if told is not None:
        return told
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
    before = torch.get_num_threads()
    told = getattr(_told, "threads", None)
    _told.threads = num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _told.threads = told


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
