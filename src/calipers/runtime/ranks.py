"""The processes of one job, called ranks: what each can rely on, and the job of one process."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from calipers.errors import ConfigurationError
from calipers.statistics.base import Statistic

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of one job. All of them take the same steps in the same order.

    Subclass it to run jobs on something else than ``torch.distributed``, and enter
    :func:`use_ranks` in each process.

    :ivar rank: the number of this process
    :ivar world_size: how many there are
    """

    rank: int
    world_size: int

    @abstractmethod
    def step(self, what: str, *, together: bool = False) -> AbstractContextManager[None]:
        """Do something that all processes do; if it fails in one, it fails in all.

        :param what: what messages call the step
        :param together: whether the processes need each other in the block, so that it fails if one
            of them is gone; otherwise they must not wait for each other in it
        """

    @abstractmethod
    def check(self) -> None:
        """Raise if another process has failed or died: call it now and then in a long step."""

    @abstractmethod
    def share(self, mine: T) -> list[T]:
        """Give something to all processes, and get what each gave, with its tensors on the CPU."""

    @abstractmethod
    def merge(self, statistics: Sequence[Statistic]) -> None:
        """Let the statistics of each process become those of all data."""

    def agree(self, mine: Mapping[str, Any]) -> None:
        """Raise if something that must be the same in all processes is not."""
        everyone = self.share(dict(mine))
        for name in mine:
            values = [theirs.get(name) for theirs in everyone]
            if any(value != values[0] for value in values):
                rank, other = next((r, v) for r, v in enumerate(values) if v != values[0])
                raise ConfigurationError(
                    f"The ranks do not agree on {name}: rank 0 has {values[0]}, rank {rank} has "
                    f"{other}",
                    hint="Every process must be given the same model, recipe, data and options",
                )

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


class SingleProcess(Ranks):
    """The job of one process: there is nobody to wait for."""

    rank, world_size = 0, 1

    def step(self, what: str, *, together: bool = False) -> AbstractContextManager[None]:  # noqa: ARG002
        """Run the block."""
        return nullcontext()

    def check(self) -> None:
        """Return at once."""

    def share(self, mine: T) -> list[T]:
        """Return it alone."""
        return [mine]

    def merge(self, statistics: Sequence[Statistic]) -> None:
        """Leave them as they are."""


_ranks_in_use: ContextVar[Ranks | None] = ContextVar("ranks_in_use", default=None)


@contextmanager
def use_ranks(ranks: Ranks) -> Iterator[None]:
    """Let the calls in this block be one process of a job that others have started and connected.

    Without it, ``oneshot`` and ``measure`` join the processes of the launcher, if there are any.
    """
    token = _ranks_in_use.set(ranks)
    try:
        yield
    finally:
        _ranks_in_use.reset(token)


def ranks_in_use() -> Ranks | None:
    """Return the ranks of the block around; None where there is none."""
    return _ranks_in_use.get()
