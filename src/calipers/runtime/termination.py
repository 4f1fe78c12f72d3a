"""SIGTERM, by which a launcher ends all processes of a job when one of them has died."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

Address = tuple[str, int]
"""The machine and the number of a process."""


class Terminated(BaseException):
    """This process was told to stop.

    It is no ``Exception``: like Ctrl-C, it is not for anybody on the way to deal with.

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
