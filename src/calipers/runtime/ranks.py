"""Many processes: who does what, and how all of them learn when one fails."""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from typing_extensions import Self

from calipers.errors import (
    CalipersError,
    ConfigurationError,
    RankError,
    Text,
    first_line,
    text_of,
)
from calipers.runtime.launch import Launch, check_address, find_launch
from calipers.runtime.termination import TerminationHandler, my_address
from calipers.statistics.base import Statistic
from calipers.statistics.communication import gather
from calipers.statistics.sync import sync_statistics

T = TypeVar("T")

DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long others are waited for that have not been heard of yet."""

SILENCE = timedelta(seconds=40)
"""How long a process may give no sign of life; with the pauses between looks, within a minute."""

_SIGNS = 10
"""How many signs of life a process gives while others would wait for one."""

# All processes count alike.
_worlds = itertools.count()
_jobs = itertools.count()


def join_processes(timeout: timedelta = DEFAULT_TIMEOUT) -> bool:
    """Join the other processes of the job; False if there are none, or it is done.

    Where there are accelerators, the process takes the one with its local number.
    """
    if not dist.is_available() or dist.is_initialized():
        return False
    launch = find_launch()
    if launch.world_size == 1:
        return False
    check_address(launch)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        local_rank = launch.rank if launch.local_rank is None else launch.local_rank
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    backend = dist.get_default_backend_for_device(device or "cpu")
    # Under keys of its own: what other groups, before or after, leave in the store is not read.
    prefix = f"calipers/world/{next(_worlds)}"
    dist.init_process_group(
        backend,
        store=PrefixStore(prefix, _store_of(launch, timeout)),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    return True


@cache
def _store_of(launch: Launch, timeout: timedelta) -> Any:
    """Return the store of a launch, the same for all jobs of this process.

    Without torchrun the first process hosts it: were it made anew for each job, another one that is
    quicker would find the old one, which is about to go.
    """
    try:
        return next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]
    except RuntimeError as error:
        raise RankError(
            f"has not found the others of {launch.world_size} processes within "
            f"{timeout.total_seconds():g} s: {first_line(str(error))}",
            subject=f"Rank {launch.rank}",
            hint="Start all of them at about the same time, with the same MASTER_ADDR and "
            "MASTER_PORT. If this one is meant to work for itself, set WORLD_SIZE=1",
        ) from error


def fingerprint(model: torch.nn.Module) -> str:
    """Return a text that differs where the weights of models do, from a few values of each."""
    digest = digest_of(model.named_parameters())
    return f"{type(model).__name__} with the fingerprint {digest[:8]}"


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a text that differs where tensors do, from a few values of each."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        values = tensor.detach().flatten()[:: max(1, tensor.numel() // 16)]
        digest.update(f"{name} {tuple(tensor.shape)} {values.dtype}".encode())
        digest.update(bytes(values.cpu().contiguous().view(torch.uint8).tolist()))
    return digest.hexdigest()


class Ranks:
    """The processes of one job. Within a ``with``, all take the same steps in the same order.

    They meet in the store of their process group, where each notes that it is there, and the first
    one that fails notes why. So every process can tell who failed and who is missing.

    :param timeout: how long a process that gives no sign of life is waited for; by default
        ``SILENCE``, or ``DEFAULT_TIMEOUT`` if it has not come yet
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.silence, self.timeout = timeout or SILENCE, timeout or DEFAULT_TIMEOUT
        self._interval = self.silence / _SIGNS
        self.rank, self.world_size = 0, 1
        self._made_world = False
        self._groups: list[Any] = []
        self._pulse: _Pulse | None = None
        self._steps, self._step = 0, "starting"
        self._termination = TerminationHandler()

    def __enter__(self) -> Self:
        self._made_world = join_processes(self.timeout)
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        try:
            if self.world_size > 1:
                self._termination.install()
                self._connect()
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self.world_size > 1 and isinstance(error, Exception):
            # If it was between two steps, the others learn it at the end of the next.
            self._steps += 1
            with suppress(RuntimeError):
                self._arrive("preparing the next step", error)
        if error is not None:
            self._destroy_groups()  # who waits in one for this process hears of it at once
        if self._made_world and (error is None or isinstance(error, Exception)):
            self._part()
        self._leave(error)

    def _part(self) -> None:
        """Let all hear how it ended: without torchrun the store goes with the first process."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0 and not dist.is_torchelastic_launched():
                alive = set(range(self.world_size)).difference(self._lost())
                self._wait_for([f"left/{rank}" for rank in alive], self.silence)

    def _leave(self, error: BaseException | None) -> None:
        self._disconnect()
        self._termination.remove()
        told = self._termination.told
        if told is not None and error is not None:
            raise _was_told_to_stop(self.rank, self._step, told.gone) from error

    def _connect(self) -> None:
        world: Any = dist.group.WORLD
        self._store = PrefixStore(f"calipers/{next(_jobs)}", world.get_group_store())
        self._pulse = _Pulse(self._store, self.rank, self.world_size, self._interval)
        self._pulse.start()
        with self.step("starting"):
            pass
        # Whoever hangs because another is gone has noticed before anybody else stops waiting.
        patience = self.timeout / 2
        with self.step("connecting", together=True):
            self._groups.append(dist.new_group(backend="gloo", timeout=patience))
            if dist.get_backend() != "gloo":
                self._groups.append(dist.new_group(timeout=patience))
        self._termination.others = self.share(my_address())

    def _disconnect(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()
        self._destroy_groups()
        if self._made_world:
            dist.destroy_process_group()
            self._made_world = False

    def _destroy_groups(self) -> None:
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    # Steps

    @contextmanager
    def step(self, what: str, *, together: bool = False) -> Iterator[None]:
        """Do something that all processes do; if it fails in one, it fails in all.

        :param what: what messages call the step
        :param together: whether the processes need each other in the block, so that it fails if one
            of them is gone; otherwise they must not wait for each other in it
        """
        if self.world_size == 1:
            yield
            return
        self._steps, self._step = self._steps + 1, what
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        missing = self._meet(what, failure)
        if failure is not None and (not together or isinstance(failure, CalipersError)):
            raise failure
        if missing:
            raise self._does_not_answer(missing) from failure
        self.check()
        if failure is not None:
            raise failure

    def check(self) -> None:
        """Raise if another process has failed or died: call it now and then in a long step."""
        self._termination.check()
        key = f"{self._steps}/failure"
        if self.world_size > 1 and self._store.check([key]):
            told = json.loads(self._store.get(key))
            if told["rank"] != self.rank:
                raise RankError(
                    f"failed while {told['step']}, so this process stops too",
                    subject=f"Rank {told['rank']}",
                    hint=Text.from_data(told["error"]),
                )
        lost = self._lost()
        if lost:
            raise self._does_not_answer(lost)

    def _meet(self, what: str, failure: Exception | None) -> list[int]:
        """Tell the others how it went, wait for them, and return who will not come."""
        try:
            # What this process has only heard of, the others hear of themselves.
            self._arrive(what, None if isinstance(failure, RankError) else failure)
            return self._await([f"{self._steps}/{rank}" for rank in range(self.world_size)])
        except RuntimeError as error:
            raise RankError(
                f"The store of the process group cannot be reached after {what}: "
                f"{first_line(str(error))}",
                hint="It is kept by torchrun or, without it, by rank 0: look at the output of "
                "that process",
            ) from failure or error

    def _await(self, keys: list[str]) -> list[int]:
        """Wait for the keys of all; return those that neither come nor give a sign of life.

        Who lives is waited for, however long it takes.

        :param keys: what each process leaves in the store, by its number
        """
        while True:
            self._wait_for(keys, self._interval)
            missing = {rank for rank, key in enumerate(keys) if not self._store.check([key])}
            lost = [rank for rank in self._lost() if rank in missing]
            if lost or not missing:
                return lost

    def _wait_for(self, keys: list[str], longest: timedelta) -> None:
        """Wait for keys; the store's own wait would not heed signals meanwhile."""
        pause, end = 0.001, time.monotonic() + longest.total_seconds()
        while not self._store.check(keys) and time.monotonic() < end:
            self._termination.check()
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _lost(self) -> list[int]:
        """Return who has given no sign of life for too long."""
        heard = [] if self._pulse is None else list(self._pulse.silence)
        return [rank for rank, silence in enumerate(heard) if silence > self._patience(rank)]

    def _patience(self, rank: int) -> float:
        """Return how many seconds a process may be silent; one that is yet to come, longer."""
        has_come = self._pulse is not None and self._pulse.signs[rank] is not None
        return (self.silence if has_come else self.timeout).total_seconds()

    def _does_not_answer(self, ranks: Sequence[int]) -> RankError:
        return _does_not_answer(self._step, self._patience(ranks[0]), ranks)

    def _arrive(self, what: str, failure: Exception | None) -> None:
        if failure is not None:
            error = (f"{type(failure).__name__}: " + text_of(failure)).to_data()
            told = json.dumps({"rank": self.rank, "step": what, "error": error}, default=str)
            self._store.compare_set(f"{self._steps}/failure", "", told)
        self._store.set(f"{self._steps}/{self.rank}", "here")

    # Exchange

    def share(self, mine: T) -> list[T]:
        """Give something to all processes, and get what each gave, with its tensors on the CPU."""
        if self.world_size == 1:
            return [mine]
        with self.step("exchanging results", together=True):
            return gather(mine, self._groups[0])

    def merge(self, statistics: Sequence[Statistic]) -> None:
        """Let the statistics of each process become those of all data."""
        if self.world_size > 1 and statistics:
            with self.step("merging statistics", together=True):
                for work in sync_statistics(statistics, self._groups[-1]):
                    work.wait()

    def agree(self, mine: Mapping[str, Any]) -> None:
        """Raise if something that must be the same in all processes is not."""
        everyone = self.share(dict(mine))
        for name in mine:
            values = [theirs.get(name) for theirs in everyone]
            if any(value != values[0] for value in values):
                raise _disagree(name, values)

    # Work

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


class _Pulse(threading.Thread):
    """Gives signs of life and looks for those of others, whatever the process is busy with.

    :ivar signs: the last sign of each process; None before the first
    :ivar silence: for how many seconds the sign of each process has been the same. Looks are
        counted, not the time: a job that was suspended as a whole has missed none
    """

    def __init__(self, store: PrefixStore, rank: int, world_size: int, interval: timedelta) -> None:
        super().__init__(daemon=True)
        self._store, self._rank, self._interval = store, rank, interval.total_seconds()
        self._stopped = threading.Event()
        self.signs: list[bytes | None] = [None] * world_size
        self.silence = [0.0] * world_size

    def run(self) -> None:
        for number in itertools.count():
            with suppress(RuntimeError):
                self._store.set(_sign(self._rank), str(number))
                for rank in range(len(self.signs)):
                    self._look_for(rank)
            if self._stopped.wait(self._interval):
                return

    def _look_for(self, rank: int) -> None:
        key = _sign(rank)
        sign = self._store.get(key) if self._store.check([key]) else None
        silent = sign == self.signs[rank]
        self.signs[rank] = sign
        self.silence[rank] = self.silence[rank] + self._interval if silent else 0.0

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def _sign(rank: int) -> str:
    return f"alive/{rank}"


# What is said


def _does_not_answer(step: str, seconds: float, ranks: Sequence[int]) -> RankError:
    names = ", ".join(f"rank {rank}" for rank in ranks)
    return RankError(
        f"did not finish {step} and gave no sign of life for {seconds:g} s, so this process stops "
        "too",
        subject=f"{names[0].upper()}{names[1:]}",
        hint="Look at the output of that rank: it died, or its machine cannot be reached",
    )


def _was_told_to_stop(rank: int, step: str, gone: Mapping[int, str]) -> RankError:
    """Say that it was, as launchers do with all others when one has died."""
    told = f"was told to stop (SIGTERM) while {step}"
    hint = (
        "Launchers do that when another process of the job has ended, or the job is cancelled. "
        "Look at what the launcher says"
    )
    if gone:
        who = " and ".join(f"rank {other} ({where})" for other, where in gone.items())
        told += (
            f", and {who} {'is' if len(gone) == 1 else 'are'} gone: it crashed or was killed, "
            "perhaps for want of memory"
        )
        hint = "Look at its output"
    return RankError(told, subject=f"Rank {rank}", hint=f"{hint}. Nothing half-written is left")


def _disagree(what: str, values: Sequence[Any]) -> ConfigurationError:
    other = next(rank for rank, value in enumerate(values) if value != values[0])
    return ConfigurationError(
        f"The ranks do not agree on {what}: rank 0 has {values[0]}, rank {other} has "
        f"{values[other]}",
        hint="Every process must be given the same model, recipe, data and options",
    )
