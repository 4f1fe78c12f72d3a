"""Tables, charts and names for people: what commands show in a terminal.

Strings are printed as they are: the console takes no markup.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

    from calipers.evaluation import Difference
    from calipers.judging.losses import ModuleLoss
    from calipers.measurements.summary import LayerGrid

Row = TypeVar("Row")

SHOWN = 5
"""How many of the worst modules are listed."""
_LONGEST = 42
"""Names up to this length stay on one line, in a terminal of 80 columns, too."""
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_BLOCKS = " ▁▂▃▄▅▆▇█"
_LOWEST = 0.05
"""The part of the values, the smallest ones, that an axis may have in its first column."""
_HEAT = (
    *("", "black on color(229)", "black on color(221)", "black on color(214)"),
    *("black on color(208)", "white on color(160)"),
)
"""From what is harmless to what is not, in colours of 256."""


# Tables


def table(
    *columns: str, numbers: Sequence[str] = (), wrapped: Sequence[str] | None = None
) -> Table:
    """Return a table with a line below its head.

    :param numbers: columns that stand to the right
    :param wrapped: columns that may take several lines; by default all but the first
    """
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        wraps = name in (columns[1:] if wrapped is None else wrapped)
        side = "right" if name in numbers else "left"
        result.add_column(name, justify=side, no_wrap=not wraps, overflow="fold")  # type: ignore[arg-type]
    return result


def facts_table(facts: Mapping[str, str]) -> Table:
    """Return a table of words and what there is to say about each."""
    from rich.table import Table

    result = Table(box=None, pad_edge=False, show_header=False)
    result.add_column(no_wrap=True)
    result.add_column(overflow="fold")
    for name, value in facts.items():
        result.add_row(name, value)
    return result


def worst_modules(losses: Sequence[ModuleLoss]) -> list[RenderableType]:
    """Return a table of the modules that lose most, and why, below its title."""
    from rich.table import Table
    from rich.text import Text

    from calipers.judging.losses import format_decibels

    if not losses:
        return []
    title = "Modules whose output loses most, and through what:"
    if all(loss.of == "weight" for loss in losses):
        title = "Weights that lose most (without data, what outputs lose is not known):"
    rows = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    rows.add_column(justify="right", no_wrap=True)
    rows.add_column(justify="right", no_wrap=True)
    is_short = max(len(loss.module) for loss in losses[:SHOWN]) <= _LONGEST
    rows.add_column(overflow="fold", no_wrap=is_short)
    rows.add_column()
    for loss in losses[:SHOWN]:
        why = "the error of the weight itself" if loss.of == "weight" else loss.reason
        rows.add_row(f"  {format_decibels(loss.error)}", f"{loss.error:.2%}", loss.module, why)
    return ["", Text(title, style="bold"), rows]


def alike(
    rows: Iterable[Row], name_of: Callable[[Row], str], properties_of: Callable[[Row], Hashable]
) -> Iterator[tuple[str, list[Row]]]:
    """Group rows with the same properties whose names differ in their numbers alone.

    Each group comes with one name for all of it.

    >>> names = ["layers.0.mlp", "head", "layers.1.mlp", "layers.2.mlp", "layers.5.mlp"]
    >>> for name, group in alike(names, str, lambda _: None):
    ...     print(name, len(group))
    layers.{0..2,5}.mlp ×4 4
    head 1
    """
    groups: dict[Hashable, list[Row]] = defaultdict(list)
    for row in rows:
        groups[_NUMBER.sub("*", name_of(row)), properties_of(row)].append(row)
    for group in groups.values():
        name = common_name([name_of(row) for row in group])
        yield (name if len(group) == 1 else f"{name} ×{len(group)}"), group


def common_name(names: Sequence[str]) -> str:
    """Return one name for modules whose names differ in their numbers alone."""
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names), strict=True)
    numbers = map(_ranges, columns)
    return _NUMBER.sub(lambda _: next(numbers), names[0])


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    if len(runs) == 1 and len(runs[0]) == 1:
        return str(runs[0][0])
    return "{" + ",".join("..".join(map(str, run)) for run in runs) + "}"


def format_difference(difference: Difference) -> str:
    """Return a difference with its interval; that it is noise is said where that does not.

    >>> from calipers.evaluation import Difference
    >>> format_difference(Difference(0.25, 0.2, 0.3, noise=0.5))
    '+0.2500 [+0.2000, +0.3000] noise'
    """
    hidden = not difference.beyond_noise and not difference.holds(0)
    return difference.text("+.4f") + (" noise" if hidden else "")


# Charts


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
            cells = (self._cell(line[number]) for line in self.grid.values)
            width = min(room, max(map(len, (f"{kind} ", *cells))) + 1)
            if row and sum(each for _, each in row) + width > room:
                yield row
                row = []
            row.append((number, width))
        if row:
            yield row

    def _lines(self, left: int, columns: Sequence[tuple[int, int]]) -> Iterator[Text]:
        from rich.text import Text

        from calipers.reporting.html import share_of_scale

        head = f"{'layer':<{left}}"
        for number, width in columns:
            name, most = self.grid.kinds[number], width - 2
            if len(name) > most:
                name = name[: max(0, most - 1)] + "…"
            head += f"{name} ".rjust(width)
        yield Text(head, style="bold", no_wrap=True, overflow="ellipsis")
        for layer, values in zip(self.grid.layers, self.grid.values, strict=True):
            line = Text(f"{layer:<{left}}", no_wrap=True, overflow="ellipsis")
            for number, width in columns:
                value = values[number]
                style = "dim"
                if value is not None:
                    share = share_of_scale(value, self.ends)
                    style = _HEAT[min(len(_HEAT) - 1, int(share * len(_HEAT)))]
                line.append(" ")
                line.append(self._cell(value).rjust(width - 1), style)
            yield line

    def _cell(self, value: float | None) -> str:
        if value is None:
            return "· "
        cell = f"{value:{self.form}} "
        return cell if float(cell) else cell.lstrip("-")
