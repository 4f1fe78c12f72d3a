"""``calipers advise``."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.app import CommandOutput
from calipers.cli.options import (
    Ignored,
    Model,
    Only,
    Overwrite,
    TrustRemoteCode,
    model_source,
    output_option,
)
from calipers.cli.rendering import SHOWN, table
from calipers.errors import format_size, listing
from calipers.files.writing import check_output_file, output_file
from calipers.options import IGNORED_BY_DEFAULT, RecipeOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers.advice import Advice
    from calipers.advice.advise import Point

MeasurementsFile = Annotated[
    Path,
    typer.Option(
        "--measurements",
        metavar="FILE",
        help="What calipers measure has found of this model; best with --collect "
        "hessian,sensitivity.",
    ),
]
Schemes = Annotated[
    str | None,
    typer.Option(
        "--schemes",
        metavar="NAME[,NAME…]",
        help="What modules may become; W4A16-g32 has groups of 32, UNQUANTIZED stays as it is.  "
        "[default: W4A16,W8A16,UNQUANTIZED, or what runs on the target]",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="NAME",
        help="Compare only schemes that run there: transformers, vllm-cpu or vllm-cuda; see "
        "'calipers schemes'.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="How weights may be rounded: rtn or gptq; again for both.  [default: rtn and, where "
        "the measurements have Hessians, gptq]",
    ),
]
Solvers = Annotated[
    list[str] | None,
    typer.Option(
        "--solver",
        metavar="NAME",
        help="An observer of weights that is tried, with its options; may be given several times.",
    ),
]
BudgetText = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="LIMIT",
        help="Bits per weight (4.5bpw), a size (900MB), what the loss may gain (0.02nats), or the "
        "error of outputs (-25dB). Without it, nothing is chosen.",
    ),
]
RecipeOutput = Annotated[
    Path | None,
    output_option("FILE", "Where the recipe goes: a YAML file."),
]

_STEPS = 8  # of the front that are shown


def advise(
    model: Model,
    measurements: MeasurementsFile,
    schemes: Schemes = None,
    budget: BudgetText = None,
    target: Target = None,
    method: Methods = None,
    solver: Solvers = None,
    ignore: Ignored = None,
    output: RecipeOutput = None,
    overwrite: Overwrite = False,
    *,
    groups: Annotated[RecipeOptions, Only("group_size")],
    compute: TrustRemoteCode,
) -> CommandOutput:
    """Tell what each module would lose in each scheme, and choose the best within a budget.

    Where the measurements have Hessians, error feedback (GPTQ) is compared with rounding to
    nearest. The recipe that is written is one for calipers quantize, and names the method. The
    model does not run.

    Example: calipers advise demo --measurements demo.safetensors --budget 4.5bpw -o recipe.yaml
    """
    if output is not None:
        check_output_file(output, overwrite, {"model": model, "measurements": measurements})
    source = model_source(model)
    from calipers import advice

    result = advice.advise(
        source,
        measurements,
        schemes,
        budget,
        methods=method,
        solvers=solver,
        group_size=groups.group_size,
        target=target,
        ignore=tuple(ignore or IGNORED_BY_DEFAULT),
        trust_remote_code=compute.trust_remote_code,
        progress=compute.progress,
    )
    if output is not None and result.recipe is not None:
        with output_file(output.resolve()) as place:
            place.write([result.recipe.to_yaml().encode()], overwrite=overwrite)
    data = {"output": None if output is None else str(output), **result.as_dict()}
    view: list[RenderableType] = [_points("all modules in", result.uniform.items(), result)]
    if result.left_out:
        view.append(f"Left out, since {target} does not run them: {listing(result.left_out)}")
    if not method and "gptq" not in result.methods:
        view.append(
            "Compared with rounding to nearest alone: 'calipers measure … --collect hessian' lets "
            "GPTQ be compared, too."
        )
    view += _front(result) if result.chosen is None else _choice(result)
    if result.chosen is None:
        view.append("Next: the same with --budget 4.5bpw -o recipe.yaml")
    elif result.recipe is None:
        view.append("Nothing is to be quantized, so there is no recipe.")
    elif output is None:
        view.append("Next: the same with -o recipe.yaml, which calipers quantize takes")
    else:
        files = ["--recipe", str(output), "--measurements", str(measurements), "-o", "OUT"]
        command = shlex.join(["calipers", "quantize", model, *files])
        view.append(f"Written to {output}, with the methods in it. Next: {command}")
    return CommandOutput(data, view)


def _front(result: Advice) -> list[RenderableType]:
    """Show some of what mixed schemes reach, evenly from the smallest to the best."""
    last = len(result.front) - 1
    steps = min(_STEPS, last + 1)
    numbers = dict.fromkeys(round(i * last / max(1, steps - 1)) for i in range(steps))
    points = _points("", (("", result.front[number]) for number in numbers), result)
    return ["What can be reached by mixing them:", points]


def _choice(result: Advice) -> list[RenderableType]:
    """Show what was chosen within the budget, and the modules that lose most by it."""
    from calipers.judging.losses import format_decibels

    assert result.total is not None
    kinds = ", ".join(f"{name} for {count}" for name, count in result.counts().items())
    proof = "no choice is better"
    if result.gap:
        proof = f"at most {result.gap:.2%} from the best choice"
    by = f" by {result.methods[0]}" if len(result.methods) == 1 else ""
    size = f"{result.total.bits:.2f} bits per weight, {format_size(result.total.size)}"
    rows = table("worst modules", "scheme", "output error", "loss", wrapped=("worst modules",))
    for each in result.worst()[:SHOWN]:
        loss = "–" if each.loss is None else f"{each.loss:+.5f}"
        rows.add_row(each.module, each.choice, format_decibels(each.error), loss)
    return [
        f"Chosen for {result.budget}: {kinds} modules; {size}, predicted "
        f"{result.format_harm(result.total.harm)} (of {listing(result.uniform)}{by}: {proof}).",
        rows,
    ]


def _points(title: str, points: Iterable[tuple[str, Point]], result: Advice) -> RenderableType:
    """Return a table of choices; without a title their names are left out."""
    first = [title] if title else []
    rows = table(*first, "bits per weight", "size", "predicted", numbers=("size",))
    for name, point in points:
        cells = [f"{point.bits:.2f}", format_size(point.size), result.format_harm(point.harm)]
        rows.add_row(*([name] if title else []), *cells)
    return rows
