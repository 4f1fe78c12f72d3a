"""Progress bars with the rate and the time left; silent where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text


class Progress:
    """Shows how far a job is.

    :param shown: whether to show anything; None: if a person looks at standard error
    """

    def __init__(self, shown: bool | None = None) -> None:
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._bars: Bars | None = None

    @contextmanager
    def counting(self, what: str, total: int, unit: str) -> Iterator[Callable[[float], None]]:
        """Show a bar; what is yielded is told how many more are done, maybe some way only.

        A bar inside another one is gone when it is done.
        """
        inside = self._bars is not None
        with self._opened() as bars:
            task = bars.add_task(what, total=total, unit=unit)
            yield partial(bars.advance, task)
            if inside:
                bars.remove_task(task)

    @contextmanager
    def _opened(self) -> Iterator[Bars]:
        """Yield the bars that are on the screen, or put some there."""
        if self._bars is not None:
            yield self._bars
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total} {task.fields[unit]}"),
            _Rate(),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=Console(stderr=True), disable=not self._shown) as self._bars:
            try:
                yield self._bars
            finally:
                self._bars = None


class _Rate(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        """Return the rate as text."""
        rate = task.finished_speed or task.speed
        return Text("" if rate is None else f"{rate:,.0f} {task.fields['unit']}/s")
