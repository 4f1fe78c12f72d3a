"""``calipers plan``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.app import CommandOutput
from calipers.cli.options import (
    Ignored,
    Model,
    RecipeFile,
    Scheme,
    TrustRemoteCode,
    model_source,
    recipe_source,
)
from calipers.cli.rendering import alike, table
from calipers.errors import Mistakes, counted, format_size
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
    parsed = mistakes.check(_recipe, scheme, recipe, ignore, changes)
    mistakes.tell()
    from calipers.checkpoint.reader import load_skeleton
    from calipers.engine.dry_run import dry_run

    skeleton = load_skeleton(source, trust_remote_code=compute.trust_remote_code)
    result = dry_run(skeleton, parsed)
    return CommandOutput({"model": model, **result.as_dict()}, _view(result, every))


def _recipe(
    scheme: str | None, recipe: Path | None, ignore: list[str] | None, changes: RecipeOptions
) -> Recipe:
    source = recipe_source(scheme, recipe, ignore)
    from calipers.recipes import load_changed_recipe

    return load_changed_recipe(source, **changes.values())


def _view(result: DryRun, every: bool) -> list[RenderableType]:
    from calipers.engine.presets import targets_text

    # where each scheme runs: a column of it would leave narrow terminals none for names
    schemes = {
        (f"{row.format} per {row.strategy}", targets_text(row.runs_on))
        for row in result.rows
        if row.tensor == "weight"
    }
    runs_on = [
        f"{scheme}: runs on {targets}." if targets else f"{scheme}: not known where it runs."
        for scheme, targets in sorted(schemes)
    ]
    tensors = counted(len(result.rows), "tensor")
    size = f"{format_size(result.before)} → {format_size(result.after)}"
    share = f"{result.after / result.before:.0%}" if result.before else "–"
    view: list[RenderableType] = [
        _table(result, every),
        f"{tensors} quantized; the checkpoint: {size} ({share}).",
        "It needs no data.",
        *runs_on,
    ]
    if result.needs_data:
        number = counted(sum(row.data == "yes" for row in result.rows), "tensor")
        options = "--data or --measurements of calipers quantize"
        view[2] = f"It needs data, for {number}: {options}."
    if result.gathered:
        view.append(f"The inputs of {counted(len(result.gathered), 'module')} are summed up.")
    if result.feedback is not None:
        view += _about_feedback(result.feedback)
    elif result.needs_data:
        memory = format_size(result.statistics)
        view.append(f"With --data, statistics take about {memory} of memory.")
    return view


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


def _table(result: DryRun, every: bool) -> Table:
    def properties(row: DryRunRow) -> tuple[object, ...]:
        sizes = (row.before, row.after)
        return (row.tensor, row.format, row.strategy, row.observer, row.data, *sizes)

    rows = table(*_COLUMNS, numbers=("before", "after"), wrapped=("module",))
    groups = alike(result.rows, lambda row: row.module, properties)
    for name, group in ((row.module, [row]) for row in result.rows) if every else groups:
        first, before, after = group[0], *_sizes(group)
        rows.add_row(
            name,
            *(first.tensor, first.format, first.strategy, first.observer, first.data),
            format_size(before) if before else "–",
            format_size(after) if after else "–",
        )
    before, after = _sizes(result.rows)
    rest = (format_size(result.before - before), format_size(result.after - after))
    rows.add_row("everything else", "", "", "", "", "", *rest)
    return rows


def _sizes(rows: Iterable[DryRunRow]) -> tuple[int, int]:
    """Return the bytes of tensors before and after."""
    rows = list(rows)
    return sum(row.before for row in rows), sum(row.after for row in rows)
