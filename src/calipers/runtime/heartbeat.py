"""Signs of life that the processes of a job leave in their store."""

from __future__ import annotations

import itertools
import threading
from contextlib import suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore


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
        """Give no more signs."""
        self._stopped.set()
        self.join()


def _sign(rank: int) -> str:
    return f"alive/{rank}"
