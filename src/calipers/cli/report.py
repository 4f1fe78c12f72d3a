"""``calipers report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.cli.app import CommandOutput
from calipers.cli.options import Overwrite, TrustRemoteCode, model_source, output_option
from calipers.errors import counted, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers.reporting.content import CheckpointFacts

Checkpoints = Annotated[
    list[Path],
    typer.Argument(metavar="CHECKPOINT…", help="Folders of quantized checkpoints of one model."),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--measurements", "-m", metavar="FILE", help="What 'calipers measure' found of the model."
    ),
]
Source = Annotated[
    str | None,
    typer.Option(
        "--source",
        metavar="MODEL",
        help="The folder of the model that they were made from; 'demo' is the one that ships.",
    ),
]
Evaluation = Annotated[
    Path | None,
    typer.Option(
        "--evaluation", metavar="FILE", help="What 'calipers evaluate --json' printed of them."
    ),
]
Advice = Annotated[
    Path | None,
    typer.Option("--advice", metavar="FILE", help="Predicted errors under other schemes, as JSON."),
]
Output = Annotated[Path, output_option("FILE", "Where the page goes: an HTML file.")]


def report(
    checkpoints: Checkpoints,
    output: Output,
    measurements: File = None,
    source: Source = None,
    evaluation: Evaluation = None,
    advice: Advice = None,
    overwrite: Overwrite = False,
    *,
    compute: TrustRemoteCode,
) -> CommandOutput:
    """Show on one page which layers of quantized checkpoints hurt, and why.

    The page is a single HTML file that works without a network.

    Example: calipers report demo-w4a16 -m demo.safetensors --source demo -o report.html
    """
    from calipers import reporting

    result = reporting.report(
        checkpoints,
        measurements,
        output,
        source=None if source is None else model_source(source),
        evaluation=evaluation,
        advice=advice,
        overwrite=overwrite,
        trust_remote_code=compute.trust_remote_code,
    )
    content, size = result.content, output.stat().st_size
    data = {
        "output": str(output),
        "file_size": size,
        "model": content.model,
        "checkpoints": {each.name: _facts(each) for each in content.checkpoints},
        "missing": list(content.missing),
    }
    view: list[RenderableType] = [
        f"Written to {output}: {format_size(size)}, {counted(len(content.names), 'module')} of "
        f"{counted(len(content.checkpoints), 'checkpoint')}. Open it in a browser."
    ]
    for each in content.checkpoints:
        for row in each.ranked[:1]:
            loss = f"{row.output_error:.2%} of its output"
            view.append(f"{each.name}: {row.name} hurts most, {loss}.")
    view += [f"Not shown: {text[0].lower()}{text[1:]}." for text in content.missing]
    view += [f"{each.name}: {text}." for each in content.checkpoints for text in each.missing]
    return CommandOutput(data, view)


def _facts(facts: CheckpointFacts) -> dict[str, Any]:
    worst = next(iter(facts.ranked), None)
    return {
        "size": facts.size,
        "bits": facts.bits,
        "median_error": facts.median_error,
        "worst": None if worst is None else worst.name,
        "worst_error": None if worst is None else worst.output_error,
        "missing": list(facts.missing),
    }
