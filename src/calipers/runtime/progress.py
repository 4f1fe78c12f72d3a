"""How far a job is: bars where a person looks, elsewhere a line about every 30 seconds."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from calipers.errors import printable
from calipers.runtime.environment import is_first_process

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

INTERVAL = 30.0
"""Seconds between two lines."""


class Add(Protocol):
    """Is told how many more are done, maybe some way only, and what is known by now."""

    def __call__(self, number: float, note: str = "") -> None:
        """Take the news."""


Begin = Callable[[float, str], Add]
"""Is told the total and its unit, when they are found out; what it returns counts it."""


@dataclass
class Phase:
    """Something that takes time.

    :param total: how much there is to do; None where nobody knows
    :param note: what is known by now
    """

    what: str
    total: float | None = None
    unit: str = ""
    note: str = ""
    done: float = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return time.monotonic() - self.began

    def add(self, number: float, note: str = "") -> None:
        """Note that some more is done."""
        self.done += number
        self.note = note or self.note

    def begin(self, total: float, unit: str) -> Add:
        """Note how much there is to do."""
        self.total, self.unit, self.done = total, unit, 0
        return self.add

    @property
    def rate(self) -> float | None:
        """How many are done in a second; None where nobody knows."""
        return self.done / self.seconds if self.total and self.done and self.seconds else None

    @property
    def seconds_left(self) -> float | None:
        """How long it will take from now on, if the rest is as fast."""
        rate = self.rate
        return max(0.0, (self.total or 0) - self.done) / rate if rate else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        known = {"done": self.done, "total": self.total, "unit": self.unit}
        speed = {"rate": self.rate, "seconds_left": self.seconds_left}
        return {
            "phase": self.what,
            **(known if self.total is not None else {}),
            "seconds": round(self.seconds, 1),
            **{name: float(f"{each:.3g}") for name, each in speed.items() if each is not None},
            **({"note": self.note} if self.note else {}),
        }

    def __str__(self) -> str:
        parts = []
        if self.total is not None:
            parts.append(f"{self.done:,.0f} of {self.total:,.0f} {self.unit}")
        parts.append(f"{clock(self.seconds)} so far")
        if self.rate is not None and self.seconds_left is not None:
            parts.append(f"{in_short(self.rate)} {self.unit}/s")
            parts.append(f"about {clock(self.seconds_left)} left")
        return f"{self.what}: {', '.join([*parts, *([self.note] if self.note else [])])}"


Write = Callable[[Sequence[Phase]], object]
"""Is given the phases that are under way, the outermost first."""


class Progress:
    """Shows how far a job is.

    :param shown: True: by bars; False: not at all; None: by bars where a person looks at standard
        error, elsewhere by a line about every 30 seconds, and of several processes of one job only
        the first shows anything
    :param write: what lines are given to; by default they go to standard error
    :param interval: seconds between two lines; None: 30
    """

    def __init__(
        self,
        shown: bool | None = None,
        *,
        write: Write | None = None,
        interval: float | None = None,
    ) -> None:
        speaks = shown is None and is_first_process()
        self._draws = bool(shown) or (speaks and can_draw_bars())
        every = INTERVAL if interval is None else interval
        self._lines = _Lines(write, every) if speaks and not self._draws else None
        self._bars: Bars | None = None

    @classmethod
    def of(cls, given: bool | Progress | None) -> Progress:
        """Return what was given, or what it says is to be shown."""
        return given if isinstance(given, Progress) else cls(given)

    @contextmanager
    def counting(self, what: str, total: float, unit: str) -> Iterator[Add]:
        """Show a phase; what is yielded is told how many more are done.

        A bar inside another one is gone when it is done.
        """
        with self._shown(Phase(what, total, unit), stays=self._bars is None) as begin:
            yield begin(total, unit)

    def waiting(self, what: str) -> AbstractContextManager[Begin]:
        """Tell of a phase of which nobody knows how far it is, unless what is yielded is told.

        Its bar is gone when it is done.
        """
        return self._shown(Phase(what), stays=False)

    @contextmanager
    def _shown(self, phase: Phase, *, stays: bool) -> Iterator[Begin]:
        if self._lines is not None:
            with self._lines.phase(phase):
                yield phase.begin
            return
        if not self._draws:
            yield phase.begin
            return
        with self._opened(transient=not stays) as bars:
            task = bars.add_task(phase.what, total=phase.total, unit=phase.unit, note="")

            def advance(number: float, note: str = "") -> None:
                bars.update(task, advance=number, note=f", {note}" if note else "")

            def begin(total: float, unit: str) -> Add:
                bars.update(task, total=total, unit=unit)
                return advance

            try:
                yield begin
            finally:
                if not stays:
                    bars.remove_task(task)

    @contextmanager
    def _opened(self, *, transient: bool) -> Iterator[Bars]:
        """Yield the bars that are on the screen, or put some there."""
        if self._bars is not None:
            yield self._bars
            return
        from calipers.runtime.terminal import make_bars

        with make_bars(transient=transient) as self._bars:
            try:
                yield self._bars
            finally:
                self._bars = None


class _Lines:
    """Writes the phases that are under way, again and again, from a thread of its own.

    Time runs on from one phase to the next: a job of many short phases is heard of, too.
    """

    def __init__(self, write: Write | None, interval: float) -> None:
        self._write, self._interval = write, interval
        self._phases: list[Phase] = []
        self._due = time.monotonic() + interval

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Have a phase written while this is open."""
        self._phases.append(phase)
        is_first = len(self._phases) == 1
        over = threading.Event()
        thread = threading.Thread(target=self._repeat, args=[over], daemon=True, name="progress")
        if is_first:
            thread.start()
        try:
            yield
        finally:
            over.set()
            if is_first:
                thread.join()
            self._phases.remove(phase)

    def _repeat(self, over: threading.Event) -> None:
        while not over.wait(max(0.0, self._due - time.monotonic())):
            self._due = time.monotonic() + self._interval
            phases = tuple(self._phases)
            with suppress(OSError, ValueError):  # nobody reads any more: the job goes on
                if self._write is None:
                    line = printable("; ".join(map(str, phases)))
                    print(line, file=sys.stderr, flush=True)
                else:
                    self._write(phases)


def can_draw_bars() -> bool:
    """Whether a person looks at standard error, at a terminal that can move its cursor."""
    return sys.stderr.isatty() and not is_plain()


def is_plain() -> bool:
    """Whether the terminal wants text and nothing else."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def in_short(number: float) -> str:
    """Return a number with as many digits as matter.

    >>> in_short(0.25), in_short(3.21), in_short(12345.6)
    ('0.25', '3.2', '12,346')
    """
    digits = 2 if abs(number) < 1 else 1 if abs(number) < 10 else 0
    return f"{number:,.{digits}f}"


def clock(seconds: float) -> str:
    """Return a time as hours, minutes and seconds.

    >>> clock(95.4)
    '0:01:35'
    """
    return str(timedelta(seconds=round(seconds)))
