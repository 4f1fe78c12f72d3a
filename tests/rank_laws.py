"""What every implementation of ranks must do, and one that runs ranks as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch

from calipers.errors import CalipersError, RankError
from calipers.runtime.distributed import joined_ranks
from calipers.runtime.ranks import Ranks, SingleProcess, use_ranks
from calipers.statistics.base import Statistic
from calipers.statistics.ranges import Extrema

T = TypeVar("T")
PATIENCE = 120


class ThreadRanks(Ranks):
    """One of several threads that work as ranks: they meet at a barrier."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world_size = rank, len(board)
        self._board, self._barrier = board, barrier
        self.knows_failure = False  # all ranks do: nobody waits for another one

    @contextmanager
    def step(self, what: str, *, together: bool = False) -> Iterator[None]:  # noqa: ARG002
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        everyone = self.share(failure)
        self.knows_failure = any(theirs is not None for theirs in everyone)
        if failure is not None:
            raise failure
        for rank, theirs in enumerate(everyone):
            if theirs is not None:
                raise RankError(f"failed while {what}: {theirs}", subject=f"Rank {rank}")

    def check(self) -> None:
        if self._barrier.broken:
            raise RankError("is gone", subject="Another rank")

    def share(self, mine: T) -> list[T]:
        self._board[self.rank] = mine
        self._barrier.wait(PATIENCE)
        everyone: list[T] = [deepcopy(theirs) for theirs in self._board]
        self._barrier.wait(PATIENCE)
        return everyone

    def merge(self, statistics: Sequence[Statistic]) -> None:
        everyone = self.share(list(statistics))
        for statistic, *theirs in zip(statistics, *everyone, strict=True):
            first, *others = theirs
            for other in others:
                first.merge(other)
            statistic.load_fields(first.copied_fields())


def in_threads(world: int, job: Callable[[Ranks], T]) -> list[T]:
    """Run a job in several threads, each of which is a rank."""
    board: list[Any] = [None] * world
    barrier = threading.Barrier(world)

    def run(rank: int) -> T:
        ranks = ThreadRanks(rank, board, barrier)
        try:
            with use_ranks(ranks):
                return job(ranks)
        except BaseException:
            if not ranks.knows_failure:  # else others may still be leaving the barrier
                barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def laws(ranks: Ranks) -> dict[str, Any]:
    """Do everything that ranks can do, and return what came of it."""
    rank, size = ranks.rank, ranks.world_size
    shared = ranks.share({"rank": rank, "tensor": torch.full((2,), rank)})
    statistics = [Extrema(), Extrema()]
    statistics[0].update(torch.tensor([[-1.0, 1.0]]) * (rank + 1))
    if rank == size - 1:  # one that only the last has data for
        statistics[1].update(torch.ones(1, 2))
    ranks.merge(statistics)
    ranks.merge([])
    ranks.agree({"model": "the same"})
    with ranks.step("working"):
        ranks.check()
    return {
        "rank": (rank, size),
        "shared": [(theirs["rank"], theirs["tensor"].tolist()) for theirs in shared],
        "merged": [{n: v.tolist() for n, v in s.copied_fields().items()} for s in statistics],
        "part": ranks.my_part(range(7), lambda job: job),
        "disagreement": _error_of(lambda: ranks.agree({"data": rank})),
        "failure": _error_of(lambda: _fail_in_the_last(ranks)),
    }


def _fail_in_the_last(ranks: Ranks) -> None:
    with ranks.step("working"):
        if ranks.rank == ranks.world_size - 1:
            raise ValueError("on purpose")


def _error_of(job: Callable[[], None]) -> tuple[str, str] | None:
    try:
        job()
    except (CalipersError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def laws_alone() -> list[dict[str, Any]]:
    return [laws(SingleProcess())]


def laws_of_process(_folder: Path) -> dict[str, Any]:
    with joined_ranks() as ranks:
        return laws(ranks)
