"""``calipers demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.cli.command import CommandOutput, console, progress, shows_bars
from calipers.cli.formatting import format_difference, format_optional_size
from calipers.cli.tables import add_row, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from calipers.demo.run import DemoResult

Folder = Annotated[
    Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the checkpoints go.")
]


def demo(output: Folder = Path("calipers-demo")) -> CommandOutput:
    """Quantize the model that ships in six ways, load each checkpoint, and compare them.

    Nothing is downloaded: the text is the standard library of this Python. Checkpoints of an
    earlier demo are replaced.

    Example: calipers demo
    """
    from calipers.demo.run import run_demo

    result = run_demo(output, tell=_tell, progress=progress())
    return CommandOutput(_data(result), _view(result))


def _tell(text: str) -> None:
    """Say what happens now, if a person looks."""
    if shows_bars():
        console(for_errors=True).print(text, style="bold")


def _data(result: DemoResult) -> dict[str, Any]:
    return {
        "folder": str(result.folder),
        "seconds": result.seconds,
        "gain": result.gain.as_dict(),
        "evaluation": result.evaluation.as_dict(),
    }


def _view(result: DemoResult) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    said = (_about(result), _verdict(result), "", _next_steps(result))
    return Group(_table(result), Text("\n".join(said)))


def _about(result: DemoResult) -> str:
    return (
        f"Perplexity per byte, on {result.evaluation.tokens:,} bytes of modules that were in "
        "neither training nor calibration. A change whose interval holds 0 may be noise, and so "
        "may one that roundings alone could make: it is marked."
    )


def _verdict(result: DemoResult) -> str:
    from calipers.demo.run import CLASSIC, OPTIMAL

    noise = "beyond noise" if result.gain.beyond_noise else "within noise"
    change = result.gain.text("+.4f")
    return (
        f"{OPTIMAL.scheme}: {OPTIMAL.weights} changes the perplexity of {CLASSIC.weights} by "
        f"{change}, {noise}."
    )


def _next_steps(result: DemoResult) -> str:
    from calipers.demo.run import OPTIMAL

    best = result.folder / OPTIMAL.folder
    return f"""\
The checkpoints are in {result.folder}. What to try next:
  calipers evaluate demo {best} --data demo
  calipers plan demo --scheme NVFP4
  calipers quantize YOUR_MODEL --scheme W4A16 --observer optimal --data YOUR.jsonl -o OUT"""


def _table(result: DemoResult) -> Table:
    from calipers.demo.run import VARIANTS

    numbers = ("size", "perplexity", "change [95 % interval]", "seconds")
    made = table("scheme", "method", "observers", *numbers, numbers=numbers, wrapped=())
    base = result.evaluation.base
    size, perplexity = format_optional_size(base.size), f"{base.perplexity.value:.4f}"
    add_row(made, "bfloat16", "", "", size, perplexity)
    for variant in VARIANTS:
        scores = result.evaluation.checkpoints[variant.folder]
        add_row(
            made,
            variant.scheme,
            variant.method,
            variant.observers,
            format_optional_size(scores.size),
            f"{scores.perplexity.value:.4f}",
            format_difference(scores.change),
            f"{result.seconds[variant.folder]:.1f}",
        )
    return made
