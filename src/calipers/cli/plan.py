"""``calipers plan``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.command import Report
from calipers.cli.options import (
    ActivationObserver,
    AllowCode,
    GroupSize,
    Ignored,
    Model,
    RecipeFile,
    Scheme,
    TrustRemoteCode,
    WeightObserver,
)
from calipers.cli.sources import model_source, recipe_source
from calipers.cli.tables import table
from calipers.cli.words import common_name, pattern_of, size_in_words
from calipers.errors import counted

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from calipers.cli.forecast import Forecast, Row

_COLUMNS = ("module", "tensor", "format", "strategy", "observer", "data", "before", "after")

All = Annotated[bool, typer.Option("--all", help="List alike modules one by one.")]


def plan(
    model: Model,
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    observer: WeightObserver = None,
    activation_observer: ActivationObserver = None,
    group_size: GroupSize = None,
    ignore: Ignored = None,
    every: All = False,
    trust_remote_code: TrustRemoteCode = False,
    allow_code: AllowCode = False,
) -> Report:
    """Show what would be quantized, and the size before and after.

    Nothing is changed, and no weight is loaded: the config of the model is enough.

    Example: calipers plan demo --scheme W4A16 --observer optimal
    """
    source = model_source(model)
    observers = (observer, activation_observer)
    wanted = recipe_source(scheme, recipe, *observers, ignore, group_size, allow_code)
    from calipers.checkpoint.reader import load_skeleton
    from calipers.cli.forecast import forecast

    skeleton = load_skeleton(source, trust_remote_code=trust_remote_code)
    found = forecast(skeleton, wanted)
    return Report({"model": model, **found.as_dict()}, _view(found, every))


def _view(found: Forecast, every: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    tensors = counted(len(found.rows), "tensor")
    size = f"{size_in_words(found.before)} → {size_in_words(found.after)}"
    share = f"{found.after / found.before:.0%}" if found.before else "–"
    lines = [f"{tensors} quantized; the checkpoint: {size} ({share}).", _about_data(found)]
    if found.gathered:
        lines.append(f"The inputs of {counted(len(found.gathered), 'module')} are summed up.")
    return Group(_table(found, every), Text("\n".join(lines)))


def _about_data(found: Forecast) -> str:
    if not found.needs_data:
        return "It needs no data."
    wanting = sum(row.data == "yes" for row in found.rows)
    return f"It needs data, for {counted(wanting, 'tensor')}: --data of calipers quantize."


def _table(found: Forecast, every: bool) -> Table:
    from rich.text import Text

    shown = table(*_COLUMNS, numbers=("before", "after"), wrapped=("module",))
    for rows in [[row] for row in found.rows] if every else _alike(found.rows):
        first = rows[0]
        name = common_name([row.module for row in rows])
        told = Text(name if len(rows) == 1 else f"{name} ×{len(rows)}")
        how = (first.tensor, first.format, first.strategy, first.observer, first.data)
        shown.add_row(told, *how, *_sizes(rows))
    rest = [total - sum(_bytes(found.rows, side)) for side, total in _totals(found)]
    shown.add_row("everything else", "", "", "", "", "", *map(size_in_words, rest))
    return shown


def _alike(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Put rows together that differ in the numbers of their modules alone."""
    groups: dict[object, list[Row]] = defaultdict(list)
    for row in rows:
        how = (row.tensor, row.format, row.strategy, row.observer, row.data, row.before, row.after)
        groups[pattern_of(row.module), how].append(row)
    return groups.values()


def _sizes(rows: Sequence[Row]) -> Iterable[str]:
    sizes = (sum(_bytes(rows, side)) for side in ("before", "after"))
    return (size_in_words(size) if size else "–" for size in sizes)


def _bytes(rows: Iterable[Row], side: str) -> Iterable[int]:
    return (getattr(row, side) for row in rows)


def _totals(found: Forecast) -> Iterable[tuple[str, int]]:
    return (("before", found.before), ("after", found.after))
