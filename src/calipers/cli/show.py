"""``calipers show``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.cli.charts import Axis, HeatMap
from calipers.cli.command import CommandOutput
from calipers.cli.formatting import format_size
from calipers.cli.losses import worst_modules
from calipers.cli.tables import add_row, facts_table, table
from calipers.errors import counted, shortened

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from calipers.measurements import Measurements
    from calipers.measurements.sufficiency import Sufficiency
    from calipers.reporting.description import CheckpointDescription

Source = Annotated[
    Path,
    typer.Argument(
        metavar="FILE|FOLDER",
        help="A file of measurements, or the folder of a checkpoint that Calipers has written.",
    ),
]

_NARROW = ("max|x|", "÷ rms", "magnitudes")
_WIDE = ("readers", "tokens", "min", "max", "÷ rms", "magnitudes", "size", "share")
_ENOUGH = 112
"""Columns of a terminal that has room for all columns of the table."""

_ABOUT_PEAKS = (
    "max|x| ÷ rms by layer and kind (of inputs, where nothing else is said). A static int8 range "
    "of such a tensor loses about this ÷ 4.4 in percent: 10 is harmless, 100 is not."
)
_ABOUT_ERRORS = "Error in dB by layer and kind: −40 is 1 %, −20 is 10 %, 0 is everything."


def show(source: Source) -> CommandOutput:
    """Show what is in a file of measurements, or in a quantized checkpoint.

    Of measurements: how large the values of each tensor are, and where they are extreme. Of a
    checkpoint: how it is quantized, its size, and what each layer loses.

    Example: calipers show demo.safetensors
    """
    if source.is_dir():
        from calipers.reporting.description import describe_checkpoint

        described = describe_checkpoint(source)
        data = {"folder": str(source), **described.as_dict()}
        return CommandOutput(data, _checkpoint_view(described))
    from calipers.measurements import Measurements

    measurements = Measurements.load(source)
    found = measurements.summary()
    sufficiency = sufficiency_of(measurements)
    data = {"file": str(source), **found, "sufficiency": _as_data(sufficiency)}
    return CommandOutput(data, _view(source, found, sufficiency))


def sufficiency_of(found: Measurements, tolerance: float = 0.1) -> Sufficiency | None:
    """Return whether the data sufficed; None where the measurements do not tell."""
    return found.sufficiency(tolerance) if found.has_halves else None


def about(
    found: Measurements, output: Path, tolerance: float = 0.1, most: int | None = None
) -> CommandOutput:
    """Tell what was written.

    :param tolerance: by how much results may still move
    :param most: how many samples would have been taken if they had not sufficed before; None
        where nothing was to stop the run
    """
    from rich.text import Text

    summary = found.summary()
    size = output.stat().st_size
    sufficiency = sufficiency_of(found, tolerance)
    data = {"output": str(output), "file_size": size, **summary}
    data["sufficiency"] = _as_data(sufficiency)
    lines = [
        f"Written to {output}: {format_size(size)}.",
        f"{counted(len(summary['tensors']), 'tensor')} of {summary['model']['class']}: "
        f"{', '.join(summary['statistics'])}.",
        f"{counted(summary['samples'], 'sample')}, {summary['tokens']:,} tokens seen.",
        *([] if most is None else [_why_stopped(sufficiency, summary["samples"], most)]),
        *sufficiency_lines(sufficiency),
    ]
    return CommandOutput(data, Text("\n".join(lines)))


def sufficiency_lines(found: Sufficiency | None) -> list[str]:
    """Say in two lines whether the data sufficed, and what to do."""
    if found is None:
        return ["Whether the data sufficed is not known: halves of it were not measured apart."]
    enough = sum(each.is_sufficient for each in found.tensors)
    first = (
        f"{enough} of {counted(len(found.tensors), 'tensor')} would move by less than "
        f"{found.tolerance:.3g} of their scale and importance with more data."
    )
    if found.unseen:
        return [first, f"A half of the data did not reach {shortened(found.unseen, 3)}."]
    if found.is_sufficient:
        return [first, "The data suffices."]
    needed = found.needed_samples
    more = "how much more is needed cannot be told" if needed is None else f"about {needed:,}"
    names = shortened([each.tensor for each in found.worst], 3)
    return [first, f"More samples are advised ({more}), most for {names}."]


def _why_stopped(found: Sufficiency | None, samples: int, most: int) -> str:
    if found is not None and found.is_sufficient and samples < most:
        return f"Stopped after {samples:,} of at most {most:,} samples: they suffice."
    return f"All {samples:,} samples were taken, of at most {most:,}."


def _as_data(found: Sufficiency | None) -> dict[str, Any] | None:
    return None if found is None else found.as_dict()


def _view(file: Path, found: dict[str, Any], sufficiency: Sufficiency | None) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from calipers.measurements.store import PEAKS
    from calipers.measurements.summary import LayerGrid

    sizes = [f"{key} {format_size(size)}" for key, size in found["statistics"].items()]
    facts = {
        "model": f"{found['model']['class']}, fingerprint {found['model']['fingerprint'][:16]}",
        "samples": f"{found['samples']:,}",
        "tokens": f"{found['tokens']:,}",
        "statistics": ", ".join(sizes),
        "size": format_size(file.stat().st_size),
        "Calipers": found["calipers"],
        "sufficiency": " ".join(sufficiency_lines(sufficiency)),
    }
    if not found["complete"]:
        facts["not finished"] = "the command that began it goes on when it is started again"
    histograms = [row["histogram"] for row in found["tensors"] if row["histogram"]]
    axis, peaks = Axis.for_all(histograms), LayerGrid(**found["peaks"])
    parts: list[RenderableType] = [facts_table(facts), _Tensors(found["tensors"], axis)]
    if histograms:
        parts.append(Text(f"{axis}; what occurred at all can be seen."))
    if peaks.kinds:
        parts += ["", Text(_ABOUT_PEAKS), HeatMap(peaks, PEAKS, ".0f")]
    return Group(*parts)


@dataclass(frozen=True)
class _Tensors:
    """A table of tensors, with the columns that a terminal has room for."""

    rows: list[dict[str, Any]]
    axis: Axis

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = _WIDE if options.max_width >= _ENOUGH else _NARROW
        numbers = [column for column in columns if column != "magnitudes"]
        made = table("tensor", *columns, numbers=numbers, wrapped=("tensor",))
        for row in self.rows:
            cells = self._cells(row)
            add_row(made, row["tensor"], *(cells[column] for column in columns))
        yield made

    def _cells(self, row: dict[str, Any]) -> dict[str, str]:
        sides = {s: "–" if row[s] is None else f"{row[s]:.4g}" for s in ("min", "max")}
        largest = max((abs(row[s]) for s in sides if row[s] is not None), default=None)
        return {
            **sides,
            "max|x|": "–" if largest is None else f"{largest:.4g}",
            "readers": str(len(row["readers"])),
            "tokens": f"{row['tokens']:,}",
            "÷ rms": "–" if row["peak"] is None else f"{row['peak']:.1f}",
            "magnitudes": self.axis.draw(row["histogram"]),
            "size": format_size(row["size"]),
            "share": f"{row['share']:.1%}",
        }


# Checkpoints


def _checkpoint_view(found: CheckpointDescription) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from calipers.judging.losses import DECIBELS, loss_grid

    checkpoint = found.checkpoint
    bits = checkpoint.bits_per_weight
    told = "" if bits is None else f", {bits:.2f} bits per quantized weight"
    facts = {
        "model": found.model,
        "quantized": counted(len(checkpoint.weights), "weight"),
        "size": format_size(checkpoint.size) + told,
        "data": _about_data(found),
        "Calipers": found.calipers,
    }
    columns = ("tensor", "format", "strategy", "scale", "targets")
    schemes = table(*columns, wrapped=("targets",))
    for row in found.schemes:
        add_row(schemes, *(row[column] for column in columns))
    grid = loss_grid(found.errors, found.costs)
    parts = [facts_table(facts), schemes, *worst_modules(found.losses())]
    if grid.kinds:
        parts += ["", Text(_ABOUT_ERRORS), HeatMap(grid, DECIBELS, ".1f")]
    return Group(*parts)


def _about_data(found: CheckpointDescription) -> str:
    if not found.tokens:
        return "none was needed"
    came = "from measurements" if found.pipeline == "measurements" else f"pipeline {found.pipeline}"
    return f"{counted(found.samples, 'sample')}, {found.tokens:,} tokens, {came}"
