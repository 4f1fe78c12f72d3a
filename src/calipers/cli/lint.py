"""``calipers lint``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.command import CommandOutput
from calipers.cli.formatting import common_name, pattern_of
from calipers.cli.sources import model_source
from calipers.cli.tables import add_row, table
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
    from calipers.linting import lint as look

    found = look(checkpoint, source)
    grave = found.counts["error"] + (found.counts["warning"] if strict else 0)
    return CommandOutput(found.as_dict(), _view(found), exit_code=1 if grave else 0)


def _view(found: LintResult) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    told = [counted(count, severity) for severity, count in found.counts.items() if count]
    read = f"{counted(found.tensors, 'tensor')} read, {len(found.weights)} weights are quantized"
    groups: dict[object, list[Finding]] = defaultdict(list)
    for finding in found.findings:
        groups[finding.severity, finding.check].append(finding)
    parts: list[RenderableType] = []
    for alike in groups.values():
        parts += [_finding(alike), ""]
    if found.against is not None and found.weights:
        parts.append(_losses(found.weights))
    parts.append(Text(f"{', '.join(told) or 'Nothing found'}. {read}."))
    return Group(*parts)


def _finding(alike: list[Finding]) -> RenderableType:
    """Show findings of the same check as one."""
    from rich.text import Text

    first = alike[0]
    told = Text.assemble((f"{first.severity}: ", _STYLES[first.severity]), first.check)
    for each in alike[:_MOST_NAMES]:
        told.append(f"\n  {in_one_line(f'{each.name} {each.problem}.', most=2000)}")
    if len(alike) > _MOST_NAMES:
        told.append(f"\n  … and {len(alike) - _MOST_NAMES:,} more, {len(alike):,} in all.")
    return told.append(f"\n  {first.hint}")


def _losses(weights: Iterable[LintedWeight]) -> Table:
    """Show the errors of weights; those that differ in their numbers alone are one row."""
    groups: dict[object, list[LintedWeight]] = defaultdict(list)
    for weight in weights:
        groups[pattern_of(weight.name), weight.scheme].append(weight)
    made = table("weight", "scheme", *_NUMBERS, numbers=_NUMBERS, wrapped=("weight",))
    for alike in groups.values():
        name = common_name([each.name for each in alike])
        add_row(
            made,
            name if len(alike) == 1 else f"{name} ×{len(alike)}",
            alike[0].scheme,
            _range([each.codes_used for each in alike], "d"),
            _range([each.saturated for each in alike], ".2%"),
            _range([each.error for each in alike], ".2%"),
            _range([each.usual_error for each in alike], ".2%"),
        )
    return made


def _range(values: Iterable[float | None], form: str) -> str:
    """Show the smallest and the largest of some figures."""
    known = [each for each in values if each is not None]
    if not known:
        return "–"
    low, high = format(min(known), form), format(max(known), form)
    return low if low == high else f"{low} … {high}"
