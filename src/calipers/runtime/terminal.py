"""The console that text and tables are printed on, and progress bars."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as Bars
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from calipers.errors import printable
from calipers.runtime.progress import clock, in_short


class SafeConsole(Console):
    """A console that text from files, such as the name of a tensor, cannot steer.

    All text passes :meth:`render`, where control characters are replaced; what rich itself sends
    to colour text and to move the cursor is no text. Brackets and colons mean nothing.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object to segments of printable text."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=printable(segment.text))


_WIDE = 120
"""Columns of a terminal that has room for long bars."""


def make_bars(*, transient: bool = False) -> Bars:
    """Return bars on standard error, as yet without any.

    :param transient: whether nothing of them stays
    """
    console = SafeConsole(stderr=True)
    what = TextColumn(
        "{task.description}{task.fields[note]}",
        markup=False,
        table_column=Column(overflow="ellipsis", no_wrap=True),
    )
    bar = BarColumn(bar_width=40 if console.width >= _WIDE else 12)
    return Bars(what, bar, _Done(), _Rate(), _Time(), console=console, transient=transient)


class _Done(ProgressColumn):
    """How many of how many."""

    def render(self, task: Task) -> Text:
        """Return the numbers as text; nothing where nobody knows how many there are."""
        if task.total is None:
            return Text("")
        return Text(f"{task.completed:.0f}/{task.total:.0f} {task.fields['unit']}")


class _Rate(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        """Return the rate as text."""
        rate = task.finished_speed or task.speed
        known = rate is not None and task.total is not None
        return Text(f"{in_short(rate)} {task.fields['unit']}/s" if known and rate else "")


class _Time(ProgressColumn):
    """The time left, or where nobody knows it, the time so far."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        """Return a time as text."""
        if task.total is None:
            return Text(clock(task.elapsed or 0.0))
        left = task.time_remaining
        return Text("-:--:--" if left is None else clock(left), style="progress.remaining")
