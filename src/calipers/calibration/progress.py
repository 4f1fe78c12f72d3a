"""A progress bar with the rate and the time left; silent where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
    """Shows how far calibration is.

    :param shown: whether to show anything; None: if a person looks at standard error
    """

    def __init__(self, shown: bool | None = None) -> None:
        self._shown = sys.stderr.isatty() if shown is None else shown

    @contextmanager
    def tokens(self, total: int) -> Iterator[Callable[[float], None]]:
        """Show tokens; what is yielded is told how many more have run, maybe some way only."""
        columns = (
            TextColumn("calibrating"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total} tokens"),
            _TokenRate(),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=Console(stderr=True), disable=not self._shown) as bars:
            task = bars.add_task("calibrating", total=total)
            yield lambda more: bars.advance(task, more)


class _TokenRate(ProgressColumn):
    """Tokens per second."""

    def render(self, task: Task) -> Text:
        """Return the rate as text."""
        rate = task.finished_speed or task.speed
        return Text("" if rate is None else f"{rate:,.0f} tokens/s")
