"""Progress bars for a terminal, with the rate and the time left."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.text import Text


def make_bars() -> Bars:
    """Return bars on standard error, as yet without any."""
    columns = (
        TextColumn("{task.description}{task.fields[note]}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total} {task.fields[unit]}"),
        _Rate(),
        TimeRemainingColumn(),
    )
    return Bars(*columns, console=Console(stderr=True))


class _Rate(ProgressColumn):
    """How many a second."""

    def render(self, task: Task) -> Text:
        """Return the rate as text."""
        rate = task.finished_speed or task.speed
        return Text("" if rate is None else f"{rate:,.0f} {task.fields['unit']}/s")
