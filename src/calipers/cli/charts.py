"""Small charts for terminals: histograms of blocks, and maps of numbers in colours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from calipers.measurements.summary import LayerGrid

_BLOCKS = " ▁▂▃▄▅▆▇█"
_LOWEST = 0.05
"""The part of the values, the smallest ones, that an axis may have in its first column."""
_HEAT = (
    "",
    "black on color(229)",
    "black on color(221)",
    "black on color(214)",
    "black on color(208)",
    "white on color(160)",
)
"""From what is harmless to what is not, in colours of 256."""


def blocks(counts: Sequence[int]) -> str:
    """Return counts as blocks of their heights; what is not zero can be seen.

    >>> blocks([0, 1, 500, 1000, 0, 2])
    ' ▁▄█ ▁'
    """
    most = max(counts, default=0)
    return "".join(_BLOCKS[math.ceil(8 * count / most) if count else 0] for count in counts)


@dataclass(frozen=True)
class Axis:
    """Powers of two, a few of them to each column.

    :param first: the exponent at which the first column begins; what is smaller falls into it, too
    :param step: how many powers of two a column holds
    """

    first: int
    step: int
    columns: int

    @classmethod
    def for_all(cls, histograms: Sequence[Mapping[str, Any]], columns: int = 16) -> Axis:
        """Return an axis on which all histograms can be compared."""
        drawn = [each for each in histograms if each["counts"]]
        last = max((each["exponent"] + len(each["counts"]) for each in drawn), default=1)
        first = min(map(_lowest, drawn), default=0)
        step = max(1, math.ceil((last - first) / columns))
        return cls(last - step * columns, step, columns)

    def draw(self, histogram: Mapping[str, Any] | None) -> str:
        """Return a histogram as blocks."""
        if histogram is None:
            return ""
        heights = [0] * self.columns
        for exponent, count in enumerate(histogram["counts"], histogram["exponent"]):
            heights[max(0, (exponent - self.first) // self.step)] += count
        return blocks(heights)

    def __str__(self) -> str:
        last = self.first + self.step * self.columns
        factor = "" if self.step == 1 else f", {self.step} to a block"
        return f"magnitudes by powers of two{factor}: 2^{self.first} or less … 2^{last}"


def _lowest(histogram: Mapping[str, Any]) -> int:
    """Return the exponent of the smallest values that are not too few to be seen."""
    total, reached = sum(histogram["counts"]), 0
    for exponent, count in enumerate(histogram["counts"], histogram["exponent"]):
        reached += count
        if reached > _LOWEST * total:
            return exponent
    raise AssertionError("a histogram without counts has no axis")


@dataclass(frozen=True)
class HeatMap:
    """Numbers by layer and kind, coloured by how far up a scale they are.

    As many columns as the terminal has room for are beside each other; the others follow below.

    :param ends: where the scale begins and ends; logarithmic where both are positive
    """

    grid: LayerGrid
    ends: tuple[float, float]
    form: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = max(map(len, ("layer", *self.grid.layers))) + 1
        for columns in self._in_rows_of(options.max_width - left):
            yield from self._lines(left, columns)

    def _in_rows_of(self, room: int) -> Iterator[list[tuple[int, int]]]:
        """Cut the columns into rows that there is room for: (number, width) of each."""
        row: list[tuple[int, int]] = []
        for number, kind in enumerate(self.grid.kinds):
            cells = (self._told(line[number]) for line in self.grid.values)
            width = min(room, max(map(len, (f"{kind} ", *cells))) + 1)
            if row and sum(each for _, each in row) + width > room:
                yield row
                row = []
            row.append((number, width))
        if row:
            yield row

    def _lines(self, left: int, columns: Sequence[tuple[int, int]]) -> Iterator[Text]:
        from rich.text import Text

        head = "".join(
            f"{_cut(self.grid.kinds[n], width - 2)} ".rjust(width) for n, width in columns
        )
        yield Text(f"{'layer':<{left}}{head}", style="bold", no_wrap=True, overflow="ellipsis")
        for layer, values in zip(self.grid.layers, self.grid.values, strict=True):
            line = Text(f"{layer:<{left}}", no_wrap=True, overflow="ellipsis")
            for number, width in columns:
                line.append(" ")
                line.append(
                    self._told(values[number]).rjust(width - 1), self._style(values[number])
                )
            yield line

    def _told(self, value: float | None) -> str:
        if value is None:
            return "· "
        told = f"{value:{self.form}} "
        return told if float(told) else told.lstrip("-")

    def _style(self, value: float | None) -> str:
        if value is None:
            return "dim"
        from calipers.reporting.html import share_of_scale

        share = share_of_scale(value, self.ends)
        return _HEAT[min(len(_HEAT) - 1, int(share * len(_HEAT)))]


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else name[: max(0, most - 1)] + "…"


@dataclass(frozen=True)
class ShellCommand:
    """A command that can be copied out of a terminal of any width, and pasted as it is.

    :param words: as the shell wants them, with their quotes
    """

    words: tuple[str, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        line = " "
        for word in self.words:
            if line.strip() and len(line) + len(word) + 3 > options.max_width:
                yield Text(f"{line} \\")
                line = "   "
            line += f" {word}"
        yield Text(line)
