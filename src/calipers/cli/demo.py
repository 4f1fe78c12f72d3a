"""``calipers demo``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from calipers.cli.app import CommandOutput, console, progress
from calipers.cli.options import output_option
from calipers.cli.rendering import format_difference, table
from calipers.errors import format_size
from calipers.runtime.progress import can_draw_bars

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers.demo.run import DemoResult

Folder = Annotated[Path, output_option("FOLDER", "Where the checkpoints go.")]


def demo(output: Folder = Path("calipers-demo")) -> CommandOutput:
    """Quantize the model that ships in six ways, load each checkpoint, and compare them.

    Nothing is downloaded: the text is the standard library of this Python. Checkpoints of an
    earlier demo are replaced.

    Example: calipers demo
    """
    from calipers.demo.run import OPTIMAL, VARIANTS, run_demo

    def tell(text: str) -> None:
        if can_draw_bars():
            console(for_errors=True).print(text, style="bold")

    result = run_demo(output, tell=tell, progress=progress())
    numbers = ("size", "perplexity", "change [95 % interval]", "seconds")
    rows = table("scheme", "method", "observers", *numbers, numbers=numbers, wrapped=())
    base = result.evaluation.base
    rows.add_row("bfloat16", "", "", format_size(base.size), f"{base.perplexity.value:.4f}")
    for variant in VARIANTS:
        scores = result.evaluation.checkpoints[variant.folder]
        rows.add_row(
            variant.scheme,
            variant.method,
            variant.observers,
            format_size(scores.size),
            f"{scores.perplexity.value:.4f}",
            format_difference(scores.change),
            f"{result.seconds[variant.folder]:.1f}",
        )
    view: list[RenderableType] = [
        rows,
        f"Perplexity per byte, on {result.evaluation.tokens:,} bytes of modules that were in "
        "neither training nor calibration. A change whose interval holds 0 may be noise, and so "
        "may one that roundings alone could make: it is marked.",
        _verdict(result),
        "",
        f"The checkpoints are in {result.folder}. What to try next:",
        f"  calipers evaluate demo {result.folder / OPTIMAL.folder} --data demo",
        "  calipers plan demo --scheme NVFP4",
        "  calipers quantize YOUR_MODEL --scheme W4A16 --observer optimal --data YOUR.jsonl -o OUT",
    ]
    return CommandOutput(result.as_dict(), view)


def _verdict(result: DemoResult) -> str:
    from calipers.demo.run import CLASSIC, OPTIMAL

    noise = "beyond noise" if result.gain.beyond_noise else "within noise"
    return (
        f"{OPTIMAL.scheme}: {OPTIMAL.weights} changes the perplexity of {CLASSIC.weights} by "
        f"{result.gain.text('+.4f')}, {noise}."
    )
