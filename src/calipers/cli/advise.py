"""``calipers advise``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.cli.command import CommandOutput
from calipers.cli.formatting import format_size
from calipers.cli.options import GroupSize, Ignored, Model, TrustRemoteCode
from calipers.cli.sources import model_source
from calipers.cli.tables import add_row, table
from calipers.errors import listing
from calipers.files.writing import check_output_file, output_file
from calipers.options import IGNORED_BY_DEFAULT

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers.advice import Advice, Prediction

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
        show_default=False,
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
        show_default=False,
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
    typer.Option("--output", "-o", metavar="FILE", help="Where the recipe goes: a YAML file."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing recipe.")]

_WORST = 5
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
    groups: GroupSize,
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
    from calipers.advice import advise as run

    found = run(
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
    if output is not None and found.recipe is not None:
        with output_file(output.resolve()) as place:
            place.write([found.recipe.to_yaml().encode()], overwrite=overwrite)
    data = {"output": None if output is None else str(output), **found.as_dict()}
    return CommandOutput(data, _view(found, model, measurements, output, target, bool(method)))


def _view(
    found: Advice,
    model: str,
    measurements: Path,
    output: Path | None,
    target: str | None,
    has_method: bool,
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_uniform(found)]
    if found.left_out:
        parts.append(Text(f"Left out, since {target} does not run them: {listing(found.left_out)}"))
    if not has_method and "gptq" not in found.methods:
        parts.append(
            Text(
                "Compared with rounding to nearest alone: 'calipers measure … --collect hessian' "
                "lets GPTQ be compared, too."
            )
        )
    if found.chosen is None:
        parts += [Text("What can be reached by mixing them:"), _front(found)]
        parts.append(Text("Next: the same with --budget 4.5bpw -o recipe.yaml"))
        return Group(*parts)
    parts += [_chosen_text(found), _worst(found)]
    if found.recipe is None:
        parts.append(Text("Nothing is to be quantized, so there is no recipe."))
    elif output is not None:
        files = ["--recipe", str(output), "--measurements", str(measurements), "-o", "OUT"]
        command = shlex.join(["calipers", "quantize", model, *files])
        parts.append(Text(f"Written to {output}, with the methods in it. Next: {command}"))
    else:
        parts.append(Text("Next: the same with -o recipe.yaml, which calipers quantize takes"))
    return Group(*parts)


def _uniform(found: Advice) -> RenderableType:
    made = table("all modules in", "bits per weight", "size", "predicted", numbers=("size",))
    for name, point in found.uniform.items():
        predicted = found.format_harm(point.harm)
        add_row(made, name, f"{point.bits:.2f}", format_size(point.size), predicted)
    return made


def _front(found: Advice) -> RenderableType:
    made = table("bits per weight", "size", "predicted", numbers=("size",))
    last = len(found.front) - 1
    steps = min(_STEPS, last + 1)
    for number in dict.fromkeys(round(i * last / max(1, steps - 1)) for i in range(steps)):
        point = found.front[number]
        add_row(made, f"{point.bits:.2f}", format_size(point.size), found.format_harm(point.harm))
    return made


def _chosen_text(found: Advice) -> RenderableType:
    from rich.text import Text

    assert found.total is not None
    kinds = ", ".join(f"{name} for {count}" for name, count in found.counts().items())
    gap = f"at most {found.gap:.2%} from the best choice"
    proof = "no choice is better" if not found.gap else gap
    by = f" by {found.methods[0]}" if len(found.methods) == 1 else ""
    size = f"{found.total.bits:.2f} bits per weight, {format_size(found.total.size)}"
    return Text(
        f"Chosen for {found.budget}: {kinds} modules; {size}, predicted "
        f"{found.format_harm(found.total.harm)} (of {listing(found.uniform)}{by}: {proof})."
    )


def _worst(found: Advice) -> RenderableType:
    from calipers.judging.losses import format_decibels

    def harm(each: Prediction) -> float:
        return each.error if each.loss is None else each.loss

    made = table("worst modules", "scheme", "output error", "loss", wrapped=("worst modules",))
    for each in sorted((found.chosen or {}).values(), key=harm, reverse=True)[:_WORST]:
        loss = "–" if each.loss is None else f"{each.loss:+.5f}"
        add_row(made, each.module, each.choice, format_decibels(each.error), loss)
    return made
