"""How the sections of speed.py are shown: instruction sets side by side, as text or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from tables import (
    Column,
    Measured,
    Row,
    mark,
    meanings,
    milliseconds,
    nanoseconds,
    number,
    plain,
    show_trust,
    table,
    trust,
)

BEGIN, END = "<!-- speed.py writes from here -->", "<!-- to here -->"
UNITS = {
    "times_faster": "×",
    "ours_to_limit": "limits",
    "ours_to_pass": "passes",
    "ours_to_search": "searches",
    "ours_to_bf16": "× bf16",
}
"""What the bounds of goals count."""

Found = Mapping[str, Measured]
"""What was measured with each instruction set: the same rows in the same order."""


class Shown(NamedTuple):
    """How a section is shown; the title may name values of the first row.

    :param shared: columns that are the same with every instruction set
    :param measured: columns that each of them has
    """

    title: str
    shared: tuple[Column, ...]
    measured: tuple[Column, ...]

    def heading(self, found: Found) -> str:
        """Return the title."""
        return self.title.format_map(next(iter(found.values())).rows[0])

    def columns(self, found: Found) -> list[Column]:
        """Return the columns of all instruction sets, side by side."""
        apart = (
            column._replace(header=f"{isa}\n{column.header}", key=f"{isa} {column.key}")
            for isa in found
            for column in self.measured
        )
        rows = (row for measured in found.values() for row in measured.rows)
        has_goals = any(row.get("goals") for row in rows)
        return [*self.shared, *apart, *([GOAL] if has_goals else [])]

    def meanings(self) -> list[str]:
        """Say what the columns mean, once for all instruction sets."""
        return meanings((*self.shared, *self.measured))


def merged(found: Found) -> Iterator[Row]:
    """Make one row of those of all instruction sets; it misses its goals if one of them does."""
    for rows in zip(*(measured.rows for measured in found.values()), strict=True):
        apart = {
            f"{isa} {key}": value
            for isa, row in zip(found, rows, strict=True)
            for key, value in row.items()
        }
        missed = any(row.get("reached") is False for row in rows)
        yield {**rows[0], **apart, "reached": not missed}


def slower_than_peer(found: Found, columns: Sequence[Column]) -> str:
    """Name the rows that are slower than the peer; nothing if no row has one."""
    raced = {
        isa: [row for row in measured.rows if row.get("peer_seconds")]
        for isa, measured in found.items()
    }
    slower = [
        f"{isa}: {', '.join(names)}"
        for isa, rows in raced.items()
        if (names := [named(row, columns) for row in rows if row["times_faster"] < 1])
    ]
    return f"Slower than the peer: {'; '.join(slower) or 'none'}." if any(raced.values()) else ""


def named(row: Row, columns: Sequence[Column]) -> str:
    """Name a row by what its first columns say."""
    return " ".join(column.text(row.get(column.key)) for column in columns)


def busiest(found: Found) -> float:
    """Return how many cores others used, at worst."""
    return max(measured.cores_used_by_others for measured in found.values())


def show(console: Console, section: Shown, found: Found) -> None:
    """Print the title, what the columns mean, the rows, and how far to trust them."""
    console.print(section.heading(found), style="bold")
    for line in section.meanings():
        console.print(f"  {line}")
    console.print(table(section.columns(found), list(merged(found))))
    slower = slower_than_peer(found, section.shared)
    if slower:
        console.print(slower)
    show_trust(console, busiest(found))


def as_markdown(section: Shown, found: Found) -> str:
    """Write the same as Markdown."""
    columns = section.columns(found)
    heads = [column.header.replace("\n", " ") for column in columns]
    lines = ["---" if column.write is str else "---:" for column in columns]
    cells = [[column.text(row.get(column.key)) for column in columns] for row in merged(found)]
    parts = (
        f"### {section.heading(found)}",
        "\n".join(f"- {line}" for line in section.meanings()),
        "\n".join(f"| {' | '.join(row)} |" for row in (heads, lines, *cells)),
        " ".join(filter(None, (slower_than_peer(found, section.shared), trust(busiest(found))))),
    )
    return "\n\n".join(parts)


def write_between(file: Path, text: str) -> None:
    """Put a text between the two marks of a file, in the place of what is there."""
    before, begin, rest = file.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{file} needs the lines\n{BEGIN}\n{END}\nbetween which to write.")
    file.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def goals(given: Sequence[Sequence[Any]]) -> str:
    """Write what a row should reach."""
    return ", ".join(f"{sign} {bound:g} {UNITS[key]}" for key, sign, bound in given)


GOAL = Column("goal", "goals", goals)
DTYPE = Column("dtype", "dtype")
SIZE = Column("size", "size", plain, "rows and columns.")
OURS = Column("ours", "ours_seconds", milliseconds, "fastest call of our observer or kernel.")
PEER = Column("peer", "peer_seconds", milliseconds, "fastest call of llm-compressor's observer.")
FASTER = Column("faster", "times_faster", number, "peer ÷ ours.")
TO_PASS = Column(
    "÷ pass",
    "ours_to_pass",
    number,
    "ours ÷ one pass over the same bytes by torch: the fastest of the largest int32, the sum of "
    "float32 and the sum of int64.",
)
REACHED = Column("", "reached", mark)
SECTIONS = {
    "min-max": Shown(
        "Min-max: memoryless_minmax of square weights",
        (Column("strategy", "strategy"), DTYPE, SIZE),
        (
            OURS,
            PEER,
            FASTER,
            TO_PASS,
            Column("kernel", "kernel_to_pass", number, "the extrema alone, in such passes."),
            REACHED,
        ),
    ),
    "searches": Shown(
        "Searches on a {size} × {size} weight",
        (
            Column("observer", "observer"),
            Column("format", "format"),
            Column("norm", "norm", plain, "exponent of the error."),
            DTYPE,
            Column("tried", "candidates", plain, "candidates per piece, if patience lasts."),
            Column(
                "ops",
                "operations",
                plain,
                "operations per value and candidate: integer codes 4, float codes 7; "
                "norm 2 +1, 3 +3, others +11; importance +1.",
            ),
        ),
        (
            OURS,
            PEER,
            FASTER,
            Column(
                "÷ limit",
                "ours_to_limit",
                number,
                "ours ÷ values × tried × ops at the rate of fused multiply-adds of torch.mm.",
            ),
            REACHED,
        ),
    ),
    "optima": Shown(
        "The best of all storable scales (optimal) of a {size} × {size} weight",
        (
            Column("format", "format"),
            Column("importance", "importance"),
            Column("dtype", "dtype", str, "of the weight, and so of its scales, but in NVFP4."),
            Column("peer's", "peer"),
        ),
        (
            OURS,
            FASTER,
            Column(
                "÷ search",
                "ours_to_search",
                number,
                "ours ÷ our memoryless_mse with its defaults, of the same format and weight.",
            ),
            Column("÷ bf16", "ours_to_bf16", number, "ours ÷ ours with a bf16 weight."),
            REACHED,
        ),
    ),
    "sums-and-counts": Shown(
        "Sums and counts of {size} tokens × {size} channels",
        (Column("kernel", "kernel"), DTYPE),
        (OURS, TO_PASS, REACHED),
    ),
    "growth": Shown(
        "Growth of searches with the size of a weight",
        (Column("what", "subject"), DTYPE, SIZE),
        (
            OURS,
            PEER,
            FASTER,
            Column("per value", "seconds_per_value", nanoseconds, "ours ÷ number of values."),
        ),
    ),
    "threads": Shown(
        "From 1 thread to {threads} on a {size} × {size} weight",
        (Column("what", "subject"), DTYPE),
        (
            Column("one", "one_thread_seconds", milliseconds, "fastest call with one thread."),
            Column("all", "all_threads_seconds", milliseconds, "fastest call with all threads."),
            Column("faster", "times_faster", number, "one ÷ all."),
        ),
    ),
}
