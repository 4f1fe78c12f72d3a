"""Tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(
    *columns: str, numbers: Sequence[str] = (), wrapped: Sequence[str] | None = None
) -> Table:
    """Return a table with a line below its head.

    :param numbers: columns that stand to the right
    :param wrapped: columns that may take several lines; by default all but the first
    """
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        wraps = name in (columns[1:] if wrapped is None else wrapped)
        side = "right" if name in numbers else "left"
        made.add_column(name, justify=side, no_wrap=not wraps, overflow="fold")  # type: ignore[arg-type]
    return made


def add_row(made: Table, *cells: str) -> None:
    """Add a row of plain text, in which brackets mean nothing."""
    from rich.text import Text

    made.add_row(*(Text(cell) for cell in cells))


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table of words and what there is to say about each."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in facts.items():
        made.add_row(name, Text(value))
    return made
