"""The ranks of ``torch.distributed``: how they meet, and how all learn when one fails."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from typing_extensions import Self

from calipers.errors import CalipersError, RankError, Text, first_line, text_of
from calipers.runtime.environment import Launch, check_address, find_launch
from calipers.runtime.ranks import Ranks, SingleProcess, ranks_in_use
from calipers.statistics.base import Statistic
from calipers.statistics.distributed import gather, sync_statistics

T = TypeVar("T")

Address = tuple[str, int]
"""The machine and the number of a process."""


class Terminated(BaseException):
    """This process was told to stop; like KeyboardInterrupt, no ``Exception`` to be handled.

    :param gone: rank → where it was, of the processes that were gone at that moment
    """

    def __init__(self, gone: dict[int, str]) -> None:
        super().__init__(gone)
        self.gone = gone


def my_address() -> Address:
    """Return the machine and the number of this process."""
    return socket.gethostname(), os.getpid()


class TerminationHandler:
    """While it is installed, SIGTERM raises :class:`Terminated` in the main thread.

    Where the signal is ignored, or in another thread, nothing is changed.

    :ivar others: where the processes of the job are, this one included
    :ivar told: what was raised
    """

    def __init__(self) -> None:
        self.others: Sequence[Address] = ()
        self.told: Terminated | None = None
        self._before: Any = None

    def install(self) -> None:
        """Answer the signal from now on."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, None):
            self._before = signal.signal(signal.SIGTERM, self._answer)

    def remove(self) -> None:
        """Let who answered before do it again."""
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _answer(self, number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once is enough: everything is being put away
        self.told = Terminated(gone_among(self.others))
        raise self.told

    def check(self) -> None:
        """Raise again what was raised before: some libraries in C lose what comes upon them."""
        if self.told is not None:
            raise self.told


def gone_among(processes: Sequence[Address]) -> dict[int, str]:
    """Return which processes of this machine have ended, and where they were."""
    host, _ = my_address()
    return {
        rank: f"process {process} on {machine}"
        for rank, (machine, process) in enumerate(processes)
        if machine == host and _has_ended(process)
    }


def _has_ended(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    with suppress(OSError, IndexError):
        # A process that has ended is listed until its parent has asked how.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return False


class Heartbeat(threading.Thread):
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
        """Give a sign and look for those of the others, until stopped."""
        for number in itertools.count():
            with suppress(RuntimeError):
                self._store.set(f"alive/{self._rank}", str(number))
                for rank, before in enumerate(self.signs):
                    key = f"alive/{rank}"
                    sign = self._store.get(key) if self._store.check([key]) else None
                    self.signs[rank] = sign
                    silence = self.silence[rank] + self._interval
                    self.silence[rank] = silence if sign == before else 0.0
            if self._stopped.wait(self._interval):
                return

    def stop(self) -> None:
        """Give no more signs."""
        self._stopped.set()
        self.join()


DEFAULT_TIMEOUT = timedelta(minutes=10)
"""How long others are waited for that have not been heard of yet."""

SILENCE = timedelta(seconds=40)
"""How long a process may give no sign of life; with the pauses between looks, within a minute."""

SIGNS = 10
"""How many signs of life a process gives while others would wait for one."""

_jobs = itertools.count()  # all processes count alike


class DistributedRanks(Ranks):
    """The processes of ``torch.distributed``, from entering a ``with`` to leaving it.

    They meet in the store of their process group, where each notes that it is there, and the first
    one that fails notes why. So every process can tell who failed and who is missing.

    :param timeout: how long a process that gives no sign of life is waited for; by default
        ``SILENCE``, or ``DEFAULT_TIMEOUT`` if it has not come yet
    :param owns_group: whether the default process group is destroyed in the end
    """

    def __init__(self, timeout: timedelta | None = None, *, owns_group: bool = False) -> None:
        self.silence, self.timeout = timeout or SILENCE, timeout or DEFAULT_TIMEOUT
        self._interval = self.silence / SIGNS
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._owns_group = owns_group
        self._groups: list[Any] = []
        self._heartbeat: Heartbeat | None = None
        self._steps, self._step = 0, "starting"
        self._termination = TerminationHandler()

    def __enter__(self) -> Self:
        try:
            self._termination.install()
            world: Any = dist.group.WORLD
            self._store = PrefixStore(f"calipers/{next(_jobs)}", world.get_group_store())
            self._heartbeat = Heartbeat(self._store, self.rank, self.world_size, self._interval)
            self._heartbeat.start()
            with self.step("starting"):
                pass
            # Whoever hangs because another is gone has noticed before anybody else stops waiting.
            patience = self.timeout / 2
            with self.step("connecting", together=True):
                self._groups.append(dist.new_group(backend="gloo", timeout=patience))
                if dist.get_backend() != "gloo":
                    self._groups.append(dist.new_group(timeout=patience))
            self._termination.others = self.share(my_address())
        except BaseException as error:
            self._leave(error)
            raise
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            # If it was between two steps, the others learn it at the end of the next.
            self._steps += 1
            with suppress(RuntimeError):
                self._arrive("preparing the next step", error)
        if error is not None:
            self._destroy_groups()  # who waits in one for this process hears of it at once
        if self._owns_group and (error is None or isinstance(error, Exception)):
            # Let all hear how it ended: without torchrun the store goes with the first process.
            with suppress(RuntimeError):
                self._store.set(f"left/{self.rank}", "")
                if self.rank == 0 and not dist.is_torchelastic_launched():
                    alive = set(range(self.world_size)).difference(self._lost())
                    self._wait_for([f"left/{rank}" for rank in alive], self.silence)
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if self._heartbeat is not None:
            self._heartbeat.stop()
        self._destroy_groups()
        if self._owns_group:
            dist.destroy_process_group()
            self._owns_group = False
        self._termination.remove()
        if self._termination.told is None or error is None:
            return
        # As launchers do with all others when one has died.
        told = f"was told to stop (SIGTERM) while {self._step}"
        hint = (
            "Launchers do that when another process of the job has ended, or the job is "
            "cancelled. Look at what the launcher says"
        )
        gone = self._termination.told.gone
        if gone:
            who = " and ".join(f"rank {rank} ({where})" for rank, where in gone.items())
            told += (
                f", and {who} {'is' if len(gone) == 1 else 'are'} gone: it crashed or was killed, "
                "perhaps for want of memory"
            )
            hint = "Look at its output"
        hint += ". Nothing half-written is left"
        raise RankError(told, subject=f"Rank {self.rank}", hint=hint) from error

    def _destroy_groups(self) -> None:
        while self._groups:
            dist.destroy_process_group(self._groups.pop())

    # Steps

    @contextmanager
    def step(self, what: str, *, together: bool = False) -> Iterator[None]:
        """Run the block and wait for the others; raise where it failed for one of them."""
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
        """Raise if another process has failed or died."""
        self._termination.check()
        key = f"{self._steps}/failure"
        if self._store.check([key]):
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
        """Tell the others how it went, wait for them, and return who will not come.

        Who lives is waited for, however long it takes.
        """
        keys = [f"{self._steps}/{rank}" for rank in range(self.world_size)]
        try:
            # What this process has only heard of, the others hear of themselves.
            self._arrive(what, None if isinstance(failure, RankError) else failure)
            while True:
                self._wait_for(keys, self._interval)
                missing = {rank for rank, key in enumerate(keys) if not self._store.check([key])}
                lost = [rank for rank in self._lost() if rank in missing]
                if lost or not missing:
                    return lost
        except RuntimeError as error:
            raise RankError(
                f"The store of the process group cannot be reached after {what}: "
                f"{first_line(str(error))}",
                hint="It is kept by torchrun or, without it, by rank 0: look at the output of "
                "that process",
            ) from failure or error

    def _wait_for(self, keys: list[str], longest: timedelta) -> None:
        """Wait for keys; the store's own wait would not heed signals meanwhile."""
        pause, end = 0.001, time.monotonic() + longest.total_seconds()
        while not self._store.check(keys) and time.monotonic() < end:
            self._termination.check()
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def _lost(self) -> list[int]:
        """Return who has given no sign of life for too long."""
        heard = [] if self._heartbeat is None else list(self._heartbeat.silence)
        return [rank for rank, silence in enumerate(heard) if silence > self._patience(rank)]

    def _patience(self, rank: int) -> float:
        """Return how many seconds a process may be silent; one that is yet to come, longer."""
        has_come = self._heartbeat is not None and self._heartbeat.signs[rank] is not None
        return (self.silence if has_come else self.timeout).total_seconds()

    def _does_not_answer(self, ranks: Sequence[int]) -> RankError:
        names = ", ".join(f"rank {rank}" for rank in ranks)
        return RankError(
            f"did not finish {self._step} and gave no sign of life for "
            f"{self._patience(ranks[0]):g} s, so this process stops too",
            subject=f"{names[0].upper()}{names[1:]}",
            hint="Look at the output of that rank: it died, or its machine cannot be reached",
        )

    def _arrive(self, what: str, failure: Exception | None) -> None:
        if failure is not None:
            error = Text(f"{type(failure).__name__}: ", text_of(failure)).to_data()
            told = json.dumps({"rank": self.rank, "step": what, "error": error}, default=str)
            self._store.compare_set(f"{self._steps}/failure", "", told)
        self._store.set(f"{self._steps}/{self.rank}", "here")

    def share(self, mine: T) -> list[T]:
        """Gather what each process gives."""
        with self.step("exchanging results", together=True):
            return gather(mine, self._groups[0])

    def merge(self, statistics: Sequence[Statistic]) -> None:
        """Reduce the statistics over all processes."""
        if statistics:
            with self.step("merging statistics", together=True):
                for work in sync_statistics(statistics, self._groups[-1]):
                    work.wait()


_worlds = itertools.count()  # all processes count alike


@contextmanager
def joined_ranks(timeout: timedelta | None = None) -> Iterator[Ranks]:
    """Join the job that ``use_ranks`` or a launcher gives to this process; else it is alone.

    :param timeout: how long a process that gives no sign of life is waited for
    """
    given = ranks_in_use()
    if given is not None:
        yield given
        return
    owns_group = False
    if dist.is_available() and not dist.is_initialized():
        launch = find_launch()
        owns_group = launch.world_size > 1
        if owns_group:
            _init_process_group(launch, timeout or DEFAULT_TIMEOUT)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with DistributedRanks(timeout, owns_group=owns_group) as ranks:
            yield ranks
    else:
        yield SingleProcess()


def _init_process_group(launch: Launch, timeout: timedelta) -> None:
    """Join the other processes of a launch, each on the accelerator of its local rank, if any."""
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
