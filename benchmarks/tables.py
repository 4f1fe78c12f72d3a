"""Sections of a benchmark: what is measured, and how it is shown."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, JustifyMethod
from rich.table import Table

BUSY = 0.2  # cores used by others, from which on a result says little

Row = dict[str, Any]


class Column(NamedTuple):
    """How one value of each row is written, and what it means."""

    header: str
    key: str
    write: Callable[[Any], str] = str
    meaning: str = ""

    def text(self, value: Any) -> str:
        """Write a value, or that there is none."""
        return "–" if value is None else self.write(value)


class Goal(NamedTuple):
    """What a value of a row should be: at least (≥) or at most (≤) so much."""

    key: str
    sign: str
    bound: float

    def met_by(self, row: Row) -> bool | None:
        """Whether a row reaches it; None if the value was not measured."""
        value = row.get(self.key)
        if value is None:
            return None
        return bool(value >= self.bound if self.sign == "≥" else value <= self.bound)


def judged(row: Row, goals: Sequence[Goal]) -> Row:
    """Add the goals of a row, and whether it reaches all of them, as far as that is known."""
    met = [goal.met_by(row) for goal in goals]
    known = False in met or (met and None not in met)
    return {**row, "goals": list(goals), "reached": all(met) if known else None}


class Measured(NamedTuple):
    """The rows of a section, and how many cores other programs used meanwhile."""

    rows: list[Row]
    cores_used_by_others: float


class Section(NamedTuple):
    """What is measured, and how it is shown; the title may name values of the first row."""

    measure: Callable[[argparse.Namespace], Iterator[Row] | list[Row]]
    title: str
    columns: tuple[Column, ...]


def show(console: Console, section: Section, measured: Measured) -> None:
    """Print the title, what the columns mean, the rows, and how far to trust them."""
    console.print(section.title.format_map(measured.rows[0]), style="bold")
    for line in meanings(section.columns):
        console.print(f"  {line}")
    console.print(table(section.columns, measured.rows))
    show_trust(console, measured.cores_used_by_others)


def meanings(columns: Sequence[Column]) -> list[str]:
    """Say what the columns mean, those whose header does not."""
    return [f"{column.header}: {column.meaning}" for column in columns if column.meaning]


def show_trust(console: Console, cores: float) -> None:
    """Print how far to trust what was measured while others used so many cores."""
    console.print(f"{trust(cores)}\n", style="bold red" if cores > BUSY else "")


def trust(cores: float) -> str:
    """Say how many cores others used meanwhile, and what to do if they were too many."""
    advice = ": too much, run it again on a quiet machine" if cores > BUSY else ""
    return f"Meanwhile other programs used {cores:.2f} cores{advice}."


def table(columns: Sequence[Column], rows: list[Row]) -> Table:
    """Lay out the rows; those that miss their floor are red."""
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        justify: JustifyMethod = "left" if column.write is str else "right"
        result.add_column(column.header, justify=justify, no_wrap=True)
    for row in rows:
        cells = (column.text(row.get(column.key)) for column in columns)
        result.add_row(*cells, style="red" if row.get("reached") is False else "")
    return result


def number(value: float) -> str:
    """Write three digits, and all of those before the point."""
    decimals = max(0, 2 - math.floor(math.log10(value)))
    return f"{value:,.{decimals}f}"


def milliseconds(value: float) -> str:
    """Write seconds as milliseconds."""
    return f"{number(1e3 * value)} ms"


def nanoseconds(value: float) -> str:
    """Write seconds as nanoseconds."""
    return f"{number(1e9 * value)} ns"


def plain(value: float) -> str:
    """Write a number without more digits than it has."""
    return f"{value:g}"


def at_most(value: float) -> str:
    """Write a limit of passes."""
    return f"≤ {value:g}"


def at_least(value: float) -> str:
    """Write how many times faster it must be."""
    return f"≥ {value:g}"


def mark(reached: bool) -> str:
    """Write whether a floor is reached."""
    return "✓" if reached else "✗"
