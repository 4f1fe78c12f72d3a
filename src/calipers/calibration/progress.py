"""A progress bar with the rate and the time left; silent where nobody looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
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
    def tokens(self, total: int) -> Iterator[Callable[[int], None]]:
        """Show tokens; what is yielded is told how many more have run."""
        with self._bars(TextColumn("{task.completed}/{task.total} tokens"), _TokenRate()) as bars:
            task = bars.add_task("calibrating", total=total)
            yield lambda more: bars.advance(task, more)

    def layers(self, names: Sequence[str]) -> Iterator[str]:
        """Go through the names of layers, and show at which one we are."""
        with self._bars(MofNCompleteColumn(), TextColumn("layers")) as bars:
            yield from bars.track(names, description="calibrating")

    def _bars(self, *middle: ProgressColumn) -> Bars:
        columns = (TextColumn("{task.description}"), BarColumn(), *middle)
        console = Console(stderr=True)
        return Bars(*columns, TimeRemainingColumn(), console=console, disable=not self._shown)


class _TokenRate(ProgressColumn):
    """Tokens per second."""

    def render(self, task: Task) -> Text:
        """Return the rate as text."""
        rate = task.finished_speed or task.speed
        return Text("" if rate is None else f"{rate:,.0f} tokens/s")
