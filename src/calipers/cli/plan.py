"""``calipers plan``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.command import CommandOutput
from calipers.cli.formatting import common_name, format_size, pattern_of
from calipers.cli.options import Ignored, Model, RecipeFile, Scheme, TrustRemoteCode
from calipers.cli.sources import model_source, recipe_source
from calipers.cli.tables import table
from calipers.errors import Mistakes, counted
from calipers.options import RecipeOptions

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from calipers.engine.dry_run import DryRun, DryRunRow, FeedbackNeeds
    from calipers.recipes import Recipe

_COLUMNS = ("module", "tensor", "format", "strategy", "observer", "data", "before", "after")

All = Annotated[bool, typer.Option("--all", help="List alike modules one by one.")]


def plan(
    model: Model,
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    ignore: Ignored = None,
    every: All = False,
    *,
    changes: RecipeOptions,
    compute: TrustRemoteCode,
) -> CommandOutput:
    """Show what would be quantized, and the size before and after.

    Nothing is changed, and no weight is loaded: the config of the model is enough.

    Example: calipers plan demo --scheme W4A16 --observer optimal
    """
    mistakes = Mistakes()
    source = mistakes.check(model_source, model)
    wanted = mistakes.check(_recipe, scheme, recipe, ignore, changes)
    mistakes.tell()
    from calipers.checkpoint.reader import load_skeleton
    from calipers.engine.dry_run import dry_run

    skeleton = load_skeleton(source, trust_remote_code=compute.trust_remote_code)
    found = dry_run(skeleton, wanted)
    return CommandOutput({"model": model, **found.as_dict()}, _view(found, every))


def _recipe(
    scheme: str | None, recipe: Path | None, ignore: list[str] | None, changes: RecipeOptions
) -> Recipe:
    source = recipe_source(scheme, recipe, ignore)
    from calipers.recipes import load_changed_recipe

    return load_changed_recipe(source, **changes.values())


def _view(found: DryRun, every: bool) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    tensors = counted(len(found.rows), "tensor")
    size = f"{format_size(found.before)} → {format_size(found.after)}"
    share = f"{found.after / found.before:.0%}" if found.before else "–"
    lines = [f"{tensors} quantized; the checkpoint: {size} ({share}).", _about_data(found)]
    lines += _where_it_runs(found)
    if found.gathered:
        lines.append(f"The inputs of {counted(len(found.gathered), 'module')} are summed up.")
    if found.feedback is not None:
        lines += _about_feedback(found.feedback)
    elif found.needs_data:
        size = format_size(found.statistics)
        lines.append(f"With --data, statistics take about {size} of memory.")
    return Group(_table(found, every), Text("\n".join(lines)))


def _where_it_runs(found: DryRun) -> Iterable[str]:
    """Say where each scheme runs; a column of it would leave narrow terminals none for names."""
    from calipers.engine.presets import targets_text

    seen = {
        (f"{row.format} per {row.strategy}", targets_text(row.runs_on))
        for row in found.rows
        if row.tensor == "weight"
    }
    for scheme, targets in sorted(seen):
        yield f"{scheme}: runs on {targets}." if targets else f"{scheme}: not known where it runs."


def _about_feedback(needs: FeedbackNeeds) -> list[str]:
    how, size = f"(error_propagation: {needs.propagation})", format_size(needs.hessians)
    memory = f"Hessians, and the work on them, take up to {size} at a time"
    if needs.hessians_at_once is None:
        runs = f"at most {counted(needs.passes, 'run')} of the data through each"
        return [f"Layers are calibrated one after another {how}: {runs}.", f"{memory}."]
    at_once = format_size(needs.hessians_at_once)
    return [
        f"Layers are calibrated on those before as they were {how}: one run of the data.",
        f"{memory} with --pipeline sequential; where the whole model runs at once, {at_once}.",
    ]


def _about_data(found: DryRun) -> str:
    if not found.needs_data:
        return "It needs no data."
    wanting = sum(row.data == "yes" for row in found.rows)
    options = "--data or --measurements of calipers quantize"
    return f"It needs data, for {counted(wanting, 'tensor')}: {options}."


def _table(found: DryRun, every: bool) -> Table:
    from rich.text import Text

    shown = table(*_COLUMNS, numbers=("before", "after"), wrapped=("module",))
    for rows in [[row] for row in found.rows] if every else _alike(found.rows):
        first = rows[0]
        name = common_name([row.module for row in rows])
        told = Text(name if len(rows) == 1 else f"{name} ×{len(rows)}")
        how = (first.tensor, first.format, first.strategy, first.observer, first.data)
        shown.add_row(told, *how, *_sizes(rows))
    rest = [total - sum(_bytes(found.rows, side)) for side, total in _totals(found)]
    shown.add_row("everything else", "", "", "", "", "", *map(format_size, rest))
    return shown


def _alike(rows: Iterable[DryRunRow]) -> Iterable[list[DryRunRow]]:
    """Put rows together that differ in the numbers of their modules alone."""
    groups: dict[object, list[DryRunRow]] = defaultdict(list)
    for row in rows:
        how = (row.tensor, row.format, row.strategy, row.observer, row.data, row.before, row.after)
        groups[pattern_of(row.module), how].append(row)
    return groups.values()


def _sizes(rows: Sequence[DryRunRow]) -> Iterable[str]:
    sizes = (sum(_bytes(rows, side)) for side in ("before", "after"))
    return (format_size(size) if size else "–" for size in sizes)


def _bytes(rows: Iterable[DryRunRow], side: str) -> Iterable[int]:
    return (getattr(row, side) for row in rows)


def _totals(found: DryRun) -> Iterable[tuple[str, int]]:
    return (("before", found.before), ("after", found.after))
