"""``calipers show``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.cli.app import CommandOutput
from calipers.cli.rendering import Axis, HeatMap, facts_table, table, worst_modules
from calipers.errors import counted, format_size, shortened

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

        checkpoint = describe_checkpoint(source)
        data = {"folder": str(source), **checkpoint.as_dict()}
        return CommandOutput(data, _checkpoint_view(checkpoint))
    from calipers.measurements import Measurements

    measurements = Measurements.load(source)
    summary = measurements.summary()
    sufficiency = measurements.sufficiency() if measurements.has_halves else None
    data = {"file": str(source), **summary, "sufficiency": sufficiency and sufficiency.as_dict()}
    return CommandOutput(data, _measurements_view(source, summary, sufficiency))


# Measurements


def about(
    measurements: Measurements, output: Path, tolerance: float = 0.1, most: int | None = None
) -> CommandOutput:
    """Say what was written to a file of measurements.

    :param tolerance: by how much results may still move
    :param most: how many samples would have been taken if they had not sufficed before; None
        where nothing was to stop the run
    """
    summary, size = measurements.summary(), output.stat().st_size
    sufficiency = measurements.sufficiency(tolerance) if measurements.has_halves else None
    data = {"output": str(output), "file_size": size, **summary}
    data["sufficiency"] = sufficiency and sufficiency.as_dict()
    samples = summary["samples"]
    view: list[RenderableType] = [
        f"Written to {output}: {format_size(size)}.",
        f"{counted(len(summary['tensors']), 'tensor')} of {summary['model']['class']}: "
        f"{', '.join(summary['statistics'])}.",
        f"{counted(samples, 'sample')}, {summary['tokens']:,} tokens seen.",
    ]
    if most is not None and sufficiency and sufficiency.is_sufficient and samples < most:
        view.append(f"Stopped after {samples:,} of at most {most:,} samples: they suffice.")
    elif most is not None:
        view.append(f"All {samples:,} samples were taken, of at most {most:,}.")
    return CommandOutput(data, [*view, *_sufficiency_lines(sufficiency)])


def _sufficiency_lines(sufficiency: Sufficiency | None) -> list[str]:
    """Say in two lines whether the data sufficed, and what to do."""
    if sufficiency is None:
        return ["Whether the data sufficed is not known: halves of it were not measured apart."]
    enough = sum(each.is_sufficient for each in sufficiency.tensors)
    first = (
        f"{enough} of {counted(len(sufficiency.tensors), 'tensor')} would move by less than "
        f"{sufficiency.tolerance:.3g} of their scale and importance with more data."
    )
    if sufficiency.unseen:
        return [first, f"A half of the data did not reach {shortened(sufficiency.unseen, 3)}."]
    if sufficiency.is_sufficient:
        return [first, "The data suffices."]
    needed = sufficiency.needed_samples
    more = "how much more is needed cannot be told" if needed is None else f"about {needed:,}"
    names = shortened([each.tensor for each in sufficiency.worst], 3)
    return [first, f"More samples are advised ({more}), most for {names}."]


def _measurements_view(
    file: Path, summary: dict[str, Any], sufficiency: Sufficiency | None
) -> list[RenderableType]:
    from calipers.measurements.store import PEAKS
    from calipers.measurements.summary import LayerGrid

    sizes = [f"{key} {format_size(size)}" for key, size in summary["statistics"].items()]
    model = summary["model"]
    facts = {
        "model": f"{model['class']}, fingerprint {model['fingerprint'][:16]}",
        "samples": f"{summary['samples']:,}",
        "tokens": f"{summary['tokens']:,}",
        "statistics": ", ".join(sizes),
        "size": format_size(file.stat().st_size),
        "Calipers": summary["calipers"],
        "sufficiency": " ".join(_sufficiency_lines(sufficiency)),
    }
    if not summary["complete"]:
        facts["not finished"] = "the command that began it goes on when it is started again"
    histograms = [row["histogram"] for row in summary["tensors"] if row["histogram"]]
    axis, peaks = Axis.for_all(histograms), LayerGrid(**summary["peaks"])
    view: list[RenderableType] = [facts_table(facts), _Tensors(summary["tensors"], axis)]
    if histograms:
        view.append(f"{axis}; what occurred at all can be seen.")
    if peaks.kinds:
        view += ["", _ABOUT_PEAKS, HeatMap(peaks, PEAKS, ".0f")]
    return view


@dataclass(frozen=True)
class _Tensors:
    """A table of tensors, with the columns that a terminal has room for."""

    rows: list[dict[str, Any]]
    axis: Axis

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = _WIDE if options.max_width >= _ENOUGH else _NARROW
        numbers = [column for column in columns if column != "magnitudes"]
        rows = table("tensor", *columns, numbers=numbers, wrapped=("tensor",))
        for row in self.rows:
            ends = [row[end] for end in ("min", "max") if row[end] is not None]
            cells = {
                "min": "–" if row["min"] is None else f"{row['min']:.4g}",
                "max": "–" if row["max"] is None else f"{row['max']:.4g}",
                "max|x|": f"{max(map(abs, ends)):.4g}" if ends else "–",
                "readers": str(len(row["readers"])),
                "tokens": f"{row['tokens']:,}",
                "÷ rms": "–" if row["peak"] is None else f"{row['peak']:.1f}",
                "magnitudes": self.axis.draw(row["histogram"]),
                "size": format_size(row["size"]),
                "share": f"{row['share']:.1%}",
            }
            rows.add_row(row["tensor"], *(cells[column] for column in columns))
        yield rows


# Checkpoints


def _checkpoint_view(description: CheckpointDescription) -> list[RenderableType]:
    from calipers.judging.losses import DECIBELS, loss_grid

    checkpoint, data = description.checkpoint, "none was needed"
    bits = checkpoint.bits_per_weight
    if description.tokens:
        pipeline = description.pipeline
        origin = "from measurements" if pipeline == "measurements" else f"pipeline {pipeline}"
        samples = counted(description.samples, "sample")
        data = f"{samples}, {description.tokens:,} tokens, {origin}"
    facts = {
        "model": description.model,
        "quantized": counted(len(checkpoint.weights), "weight"),
        "size": format_size(checkpoint.size)
        + ("" if bits is None else f", {bits:.2f} bits per quantized weight"),
        "data": data,
        "Calipers": description.calipers,
    }
    columns = ("tensor", "format", "strategy", "scale", "targets")
    schemes = table(*columns, wrapped=("targets",))
    for row in description.schemes:
        schemes.add_row(*(row[column] for column in columns))
    grid = loss_grid(description.errors, description.costs)
    view = [facts_table(facts), schemes, *worst_modules(description.losses())]
    if grid.kinds:
        view += ["", _ABOUT_ERRORS, HeatMap(grid, DECIBELS, ".1f")]
    return view
