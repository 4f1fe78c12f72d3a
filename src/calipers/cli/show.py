"""``calipers show``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.cli.command import CommandOutput
from calipers.cli.formatting import format_size
from calipers.cli.tables import add_row, facts_table, table
from calipers.errors import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers.measurements import Measurements

File = Annotated[Path, typer.Argument(metavar="FILE", help="A file of measurements.")]

_NUMBERS = ("readers", "tokens", "min", "max", "size", "share")


def show(file: File) -> CommandOutput:
    """Show what is in a file of measurements.

    Example: calipers show demo.safetensors
    """
    from calipers.measurements import Measurements

    found = Measurements.load(file).summary()
    return CommandOutput({"file": str(file), **found}, _view(file, found))


def about(found: Measurements, output: Path) -> CommandOutput:
    """Tell what was written."""
    from rich.text import Text

    summary = found.summary()
    size = output.stat().st_size
    data = {"output": str(output), "file_size": size, **summary}
    lines = [
        f"Written to {output}: {format_size(size)}.",
        f"{counted(len(summary['tensors']), 'tensor')} of {summary['model']['class']}: "
        f"{', '.join(summary['statistics'])}.",
        f"{counted(summary['samples'], 'sample')}, {summary['tokens']:,} tokens seen.",
    ]
    return CommandOutput(data, Text("\n".join(lines)))


def _view(file: Path, found: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    sizes = [f"{key} {format_size(size)}" for key, size in found["statistics"].items()]
    facts = {
        "model": f"{found['model']['class']}, fingerprint {found['model']['fingerprint'][:16]}",
        "samples": f"{found['samples']:,}",
        "tokens": f"{found['tokens']:,}",
        "statistics": ", ".join(sizes),
        "size": format_size(file.stat().st_size),
        "Calipers": found["calipers"],
    }
    if not found["complete"]:
        facts["not finished"] = "the command that began it goes on when it is started again"
    made = table("tensor", *_NUMBERS, numbers=_NUMBERS, wrapped=("tensor",))
    for row in found["tensors"]:
        add_row(
            made,
            row["tensor"],
            str(len(row["readers"])),
            f"{row['tokens']:,}",
            *(f"{row[side]:.5g}" if row[side] is not None else "–" for side in ("min", "max")),
            format_size(row["size"]),
            f"{row['share']:.1%}",
        )
    return Group(facts_table(facts), made)
