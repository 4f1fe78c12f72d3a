"""``calipers lint``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.app import CommandOutput
from calipers.cli.options import model_source
from calipers.cli.rendering import alike, table
from calipers.errors import counted, in_one_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from calipers.linting import Finding, LintedWeight, LintResult

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="The folder of a quantized checkpoint.")
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="MODEL",
        help="The folder of the model it was made from: measure the error of each weight.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Fail for warnings, too.")]

_MOST_NAMES = 3
_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold"}
_NUMBERS = ("codes used", "saturated", "error", "from extrema")


def lint(checkpoint: Checkpoint, against: Against = None, strict: Strict = False) -> CommandOutput:
    """Look for what is wrong in a quantized checkpoint, whoever wrote it.

    Tensors are read one by one, and no model is loaded. Exit code 1: there are errors.

    Example: calipers lint demo-w4a16 --against demo
    """
    source = None if against is None else model_source(against)
    from calipers import linting

    result = linting.lint(checkpoint, source)
    has_failed = result.counts["error"] or (strict and result.counts["warning"])
    return CommandOutput(result.as_dict(), _view(result), exit_code=1 if has_failed else 0)


def _view(result: LintResult) -> list[RenderableType]:
    from rich.text import Text

    groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in result.findings:
        groups[finding.severity, finding.check].append(finding)
    view: list[RenderableType] = []
    for (severity, check), group in groups.items():
        text = Text.assemble((f"{severity}: ", _STYLES[severity]), check)
        for finding in group[:_MOST_NAMES]:
            text.append(f"\n  {in_one_line(f'{finding.name} {finding.problem}.', most=2000)}")
        if len(group) > _MOST_NAMES:
            text.append(f"\n  … and {len(group) - _MOST_NAMES:,} more, {len(group):,} in all.")
        view += [text.append(f"\n  {group[0].hint}"), ""]
    if result.against is not None and result.weights:
        view.append(_losses(result.weights))
    numbers = [counted(count, severity) for severity, count in result.counts.items() if count]
    read = f"{counted(result.tensors, 'tensor')} read, {len(result.weights)} weights are quantized"
    return [*view, f"{', '.join(numbers) or 'Nothing found'}. {read}."]


def _losses(weights: Iterable[LintedWeight]) -> Table:
    """Show the errors of weights; those that differ in their numbers alone are one row."""
    result = table("weight", "scheme", *_NUMBERS, numbers=_NUMBERS, wrapped=("weight",))
    for name, group in alike(weights, lambda each: each.name, lambda each: each.scheme):
        result.add_row(
            name,
            group[0].scheme,
            _range([each.codes_used for each in group], "d"),
            _range([each.saturated for each in group], ".2%"),
            _range([each.error for each in group], ".2%"),
            _range([each.usual_error for each in group], ".2%"),
        )
    return result


def _range(values: Iterable[float | None], form: str) -> str:
    """Show the smallest and the largest of some figures."""
    known = [each for each in values if each is not None]
    if not known:
        return "–"
    low, high = format(min(known), form), format(max(known), form)
    return low if low == high else f"{low} … {high}"
