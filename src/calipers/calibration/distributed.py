"""Many processes: who does what, and how all of them learn when one fails."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed as dist

from calipers.errors import RankFailedError, RankLostError

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(minutes=10)


def is_distributed() -> bool:
    """Whether there are other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    """Return the number of this process; 0 if it is alone."""
    return dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if is_distributed() else 1


class Crew:
    """The processes of one job. Every one of them takes the same steps in the same order.

    :param timeout: how long a process waits for the others at the end of a step
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self.timeout = timeout
        self.rank, self.world_size = rank(), world_size()
        # A barrier that can tell who is missing exists for gloo only.
        gloo = self.world_size > 1 and dist.get_backend() != "gloo"
        self._group = dist.new_group(backend="gloo", timeout=timeout) if gloo else None

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Do something that all processes do; if it fails in one, it fails in all.

        In the block a process must not wait for another.
        """
        if self.world_size == 1:
            yield
            return
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        self._meet(what)
        told = None if failure is None else f"{type(failure).__name__}: {failure}"
        failures = self.share(told)
        if failure is not None:
            raise failure
        for number, text in enumerate(failures):
            if text is not None:
                raise RankFailedError(number, what, text)

    def _meet(self, what: str) -> None:
        try:
            dist.monitored_barrier(self._group, self.timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RankLostError(what, self.timeout.total_seconds(), str(error)) from error

    def share(self, mine: T) -> list[T]:
        """Give something to all processes, and get what each gave."""
        if self.world_size == 1:
            return [mine]
        everything: list[Any] = [None] * self.world_size
        dist.all_gather_object(everything, mine, group=self._group)
        return everything

    def my_part(self, jobs: Sequence[T], cost: Callable[[T], int]) -> list[T]:
        """Choose the jobs of this process, so that all have about the same to do."""
        loads = [(0, number) for number in range(self.world_size)]
        mine = []
        for index in sorted(range(len(jobs)), key=lambda i: (-cost(jobs[i]), i)):
            load, number = heapq.heappop(loads)
            heapq.heappush(loads, (load + cost(jobs[index]), number))
            if number == self.rank:
                mine.append(index)
        return [jobs[index] for index in sorted(mine)]
