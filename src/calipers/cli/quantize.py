"""``calipers quantize``."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.cli.app import CommandOutput
from calipers.cli.options import (
    STANDARD_INPUT,
    Data,
    Ignored,
    Model,
    RecipeFile,
    Scheme,
    Without,
    as_typed,
    data_source,
    is_demo,
    model_source,
    output_option,
    packed,
    recipe_source,
)
from calipers.cli.rendering import SHOWN, worst_modules
from calipers.errors import Mistakes, Option, counted, format_size, listing
from calipers.options import (
    IGNORED_BY_DEFAULT,
    CalibrationOptions,
    ComputeOptions,
    DataOptions,
    OneshotOptions,
    OutputOptions,
    RecipeOptions,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from calipers import OneshotResult
    from calipers.judging.costs import ModuleCosts
    from calipers.planning.plan import Plan

Output = Annotated[Path, output_option("FOLDER", "Where the checkpoint goes.")]
MeasurementsFile = Annotated[
    Path | None,
    typer.Option(
        "--measurements",
        metavar="FILE",
        help="What calipers measure has found of this model, instead of --data.",
    ),
]

_CLOSE = 8.0
"""Integers that end within this factor of the largest value can have a range for all of them."""
_FEW_BITS = 4
_STATES = {"q": "query state", "k": "key state", "v": "value state"}
"""The tensors of attention, as they are called beside weights and inputs."""


def quantize(
    model: Model,
    output: Output,
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    data: Data = None,
    measurements: MeasurementsFile = None,
    ignore: Ignored = None,
    *,
    changes: RecipeOptions,
    taken: Annotated[DataOptions, Without("skip")],
    calibration: CalibrationOptions,
    compute: ComputeOptions,
    written: Annotated[OutputOptions, Without("output_dir")],
) -> CommandOutput:
    """Quantize a model for vLLM and transformers.

    Writes a compressed-tensors checkpoint; if anything fails, none is left. What needs no data, or
    measurements alone, goes from disk to disk; if it is killed, the same command goes on.

    Example: calipers quantize demo --scheme W4A16 --observer optimal --data demo -o demo-w4a16
    """
    options = OneshotOptions(
        data=packed(taken, data),
        compute=compute,
        calibration=calibration,
        changes=changes,
        output=OutputOptions(output_dir=output, **written.given()),
    )
    mistakes = Mistakes()
    source = mistakes.check(model_source, model)
    dataset = mistakes.check(data_source, data, "calibration")
    parsed = mistakes.check(recipe_source, scheme, recipe, ignore)
    if mistakes:  # those that quantizing would find are told beside them
        from calipers.engine.job import check_arguments

        inputs = {"model": model, "recipe": recipe, "data": data, "measurements": measurements}
        mistakes.check(check_arguments, inputs, options)
    mistakes.tell()
    from calipers import oneshot
    from calipers.judging.losses import module_losses

    result = oneshot(source, parsed, dataset, measurements=measurements, **vars(options))
    worst = module_losses(result.errors, result.costs)[:SHOWN]
    ignored = None if scheme is None else ignore or list(IGNORED_BY_DEFAULT)
    advice = advice_on(result.costs, result.plan, ignored)
    summary = {
        "model": model,
        **_figures(result, output),
        "worst": [loss.as_dict() for loss in worst],
        "advice": advice,
        "has_data": data is not None,
        "better": _better(result.plan),
        "next": _next(model, output, data, taken, result.samples if result.tokens else None),
        "look": {
            "show": shlex.join(["calipers", "show", str(output)]),
            "lint": shlex.join(["calipers", "lint", str(output)]),
            "report": shlex.join(["calipers", "report", str(output), "-o", "report.html"]),
        },
    }
    losses = [*worst_modules(worst), *activation_lines(result.costs, advice)]
    return CommandOutput(summary, _view(summary, losses))


def _figures(result: OneshotResult, output: Path) -> dict[str, Any]:
    """Return what is known of a checkpoint as plain data; sizes are bytes of tensors."""
    from calipers.checkpoint.headers import size_on_disk

    rows, ran_in = result.plan.rows(), result.forward_dtype
    return {
        "output": str(output),
        "before": None if result.source is None else size_on_disk(result.source),
        "after": size_on_disk(output),
        "bits_per_weight": result.bits_per_weight,
        "seconds": result.seconds,
        "pipeline": result.pipeline,
        "samples": result.samples,
        "tokens": result.tokens,
        "quantized": rows,
        "errors": dict(sorted(result.errors.items(), key=lambda pair: -pair[1])),
        "costs": {name: asdict(cost) for name, cost in result.costs.items()},
        "coverage": result.coverage.as_dict(),
        "dtype": str(result.dtype).removeprefix("torch."),
        "forward_dtype": None if ran_in is None else str(ran_in).removeprefix("torch."),
    }


def _better(plan: Plan) -> str:
    """Say what would lose less, where weights of few bits have scales by their extremes alone."""
    plain = [
        spec.observer.name
        for _, spec in plan
        if spec.base_name == "weight"
        and spec.args.num_bits <= _FEW_BITS
        and spec.gathered is None
        and spec.observer is not None
        and spec.observer.takes_extrema
    ]
    if not plain:
        return ""
    return (
        f"{counted(len(plain), 'weight')} rounded to nearest with {listing(dict.fromkeys(plain))}: "
        "--method gptq, or --observer optimal, loses less (both need --data or --measurements)."
    )


def _next(
    model: str, output: Path, data: str | None, options: DataOptions, samples: int | None
) -> str:
    """Return the command that evaluates the checkpoint, on text that calibration has not seen.

    If there were fewer samples than calibration wanted, none is left in the data.

    :param samples: how many were seen; None if no data ran
    """
    command = ["calipers", "evaluate", model, str(output), "--data"]
    is_used_up = samples is not None and samples < options.num_samples
    if data is None or data == STANDARD_INPUT or is_used_up:
        return shlex.join([*command, "HELD_OUT.jsonl"])
    command.append(data)
    if samples is not None and not is_demo(data):
        command += ["--skip", str(samples)]
        # the options under which evaluate cuts the data into the same samples
        for name in ("seed", "max_seq_length", "text_column", "mask", "tokenizer", "packing"):
            if options.gives(name):
                command += as_typed(Option(name, getattr(options, name))).split(" ", 1)
    return shlex.join(command)


# What is shown of the checkpoint


def _view(summary: Mapping[str, Any], losses: Sequence[RenderableType]) -> list[RenderableType]:
    from rich.text import Text

    before, after, bits = (summary[key] for key in ("before", "after", "bits_per_weight"))
    size = format_size(after) if before is None else f"{format_size(before)} → {format_size(after)}"
    share = f" ({after / before:.0%})" if before else ""
    about_bits = "" if bits is None else f", {bits:.2f} bits per weight"
    kinds = Counter(
        (row["tensor"], f"{row['format']} per {row['strategy']}, {row['observer']}")
        for row in summary["quantized"]
    )
    commands = {
        "What each layer loses": summary["look"]["show"],
        "Whether it will load and run elsewhere": summary["look"]["lint"],
        "All of it as a page": summary["look"]["report"],
        "Next, on text that calibration has not seen": summary["next"],
    }
    view: list[RenderableType] = [
        Text.assemble(
            (f"Written to {summary['output']}", "bold"),
            f": {size}{share}{about_bits}, in {summary['seconds']:.1f} s.",
        ),
        *(
            f"  {counted(number, _STATES.get(tensor, tensor))}: {how}"
            for (tensor, how), number in kinds.items()
        ),
        _about_data(summary),
        *losses,
        *([summary["better"]] if summary["better"] else []),
        "",
    ]
    for purpose, command in commands.items():
        view += [Text(f"{purpose}:", style="bold"), ShellCommand(command)]
    return view


def _about_data(summary: Mapping[str, Any]) -> str:
    samples, tokens = counted(summary["samples"], "sample"), f"{summary['tokens']:,} tokens"
    if summary["pipeline"] == "measurements":
        return f"Measured on {samples}, {tokens}."
    if summary["tokens"]:
        forward_dtype = summary["forward_dtype"]
        computed = "" if forward_dtype == summary["dtype"] else f", computed in {forward_dtype}"
        return f"{samples}, {tokens} seen{computed}."
    return "No data was needed" + (", and --data was not read." if summary["has_data"] else ".")


@dataclass(frozen=True)
class ShellCommand:
    """A command that can be copied out of a terminal of any width, and pasted as it is."""

    command: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        line = " "
        for word in map(shlex.quote, shlex.split(self.command)):
            if line.strip() and len(line) + len(word) + 3 > options.max_width:
                yield Text(f"{line} \\")
                line = "   "
            line += f" {word}"
        yield Text(line)


# What static activations lose, and what to do about it


def activation_lines(costs: Mapping[str, ModuleCosts], advice: Sequence[str]) -> list[str]:
    """List the static activations that lose too much, or say that none does."""
    from calipers.judging.costs import COSTLY, costly

    static = {
        f"{name} {tensor}": cost
        for name, module in costs.items()
        for tensor, cost in module.tensors.items()
    }
    if not static:
        return []
    bad = {f"{name} {tensor}": cost for (name, tensor), cost in costly(costs).items()}
    if not bad:
        name = max(static, key=lambda key: static[key].worst)
        return [f"No static activation loses more than {static[name].worst:.2%} ({name})."]
    lines = [
        f"{counted(len(bad), 'static activation')} of {len(static)} lost more than {COSTLY:.0%} "
        "(typical: without the largest 0.1 % of values):",
        "    error  typical  clipped  largest, range",
    ]
    for name, cost in list(bad.items())[:SHOWN]:
        reach = f"{cost.largest:.4g}, {cost.limit:.4g}"
        errors = f"{cost.error:7.2%}  {cost.typical_error:7.2%}  {cost.clipped:7.3%}"
        lines.append(f"  {errors}  {reach:14}  {name}")
    if len(bad) > SHOWN:
        lines.append(f"  and {len(bad) - SHOWN} more")
    name, cost = next(iter(bad.items()))
    if cost.typical_error >= cost.error:
        lines.append(
            f"{name}: a few values of up to {cost.largest:.4g} take the whole range, and the "
            f"others lose {cost.typical_error:.0%}."
        )
    else:
        lines.append(
            f"{name}: values reach {cost.largest:.4g}, the range ends at {cost.limit:.4g}, and "
            f"{cost.error:.0%} is lost."
        )
    return [*lines, "What to do, any of:", *(f"  {line}" for line in advice)]


def advice_on(
    costs: Mapping[str, ModuleCosts], plan: Plan, ignored: Sequence[str] | None
) -> tuple[str, ...]:
    """Say what to type against static activations that lose too much.

    :param ignored: what ``--ignore`` has already; None if a recipe was given instead of a scheme
    """
    from calipers.judging.costs import COSTLY, costly

    bad = costly(costs)
    planned = {(module.name, tensor.base_name): tensor for module, tensor in plan}
    tensors = {at: planned[at] for at in bad if at in planned}
    if not tensors:
        return ()
    formats = {tensor.format.split()[0] for tensor in tensors.values()}
    are_states = {tensor.base_name for tensor in tensors.values()} <= _STATES.keys()
    lines = []
    if are_states:
        lines.append("leave kv_cache_scheme out of the recipe: keys and values stay as they are")
    elif ignored is None:
        lines.append("dynamic: true in input_activations of the recipe: a scale for each token")
    else:
        scheme = "FP8_DYNAMIC" if formats == {"float8"} else "W8A8"
        lines.append(f"--scheme {scheme}: a scale for each token, found while the model runs")
        if "int8" in formats:
            lines.append("--scheme FP8: static too, but floats keep small values beside large ones")
    observers = {tensor.observer.name for tensor in tensors.values() if tensor.observer}
    # whether ranges that lose little are to be expected: none holds a few huge integers
    has_better_ranges = all(
        bad[at].typical_error <= COSTLY
        and (tensor.format.startswith("float") or bad[at].largest < _CLOSE * bad[at].limit)
        for at, tensor in tensors.items()
    )
    if has_better_ranges and observers - {"histogram_mse"}:
        lines.append("--activation-observer histogram_mse: the range with the least error")
    kept = "it stays as it is" if len(bad) == 1 else "they stay as they are"
    names = list(dict.fromkeys(name for name, _ in bad))[:SHOWN]
    if not are_states and ignored is None:
        lines.append(f"ignore: [{', '.join(names)}] in the recipe: {kept}")
    elif not are_states and ignored is not None:
        flags = " ".join(f"--ignore {shlex.quote(name)}" for name in [*ignored, *names])
        lines.append(f"{flags}: {kept}")
    return tuple(lines)
