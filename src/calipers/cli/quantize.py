"""``calipers quantize``."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.cli.charts import ShellCommand
from calipers.cli.command import CommandOutput
from calipers.cli.formatting import format_size
from calipers.cli.losses import SHOWN, activation_lines, advice_on, worst_modules
from calipers.cli.options import Data, Ignored, Model, RecipeFile, Scheme, Without
from calipers.cli.sources import (
    DEMO,
    STANDARD_INPUT,
    data_source,
    model_source,
    packed,
    recipe_source,
)
from calipers.errors import Mistakes, counted, listing
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
    from rich.console import RenderableType

    from calipers import OneshotResult
    from calipers.judging.costs import ModuleCosts
    from calipers.judging.losses import ModuleLoss
    from calipers.planning.plan import Plan

Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FOLDER", help="Where the checkpoint goes."),
]
MeasurementsFile = Annotated[
    Path | None,
    typer.Option(
        "--measurements",
        metavar="FILE",
        help="What calipers measure has found of this model, instead of --data.",
        exists=False,
    ),
]


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
    texts = mistakes.check(data_source, data, "calibration")
    how = mistakes.check(recipe_source, scheme, recipe, ignore)
    if mistakes:  # those that quantizing would find are told beside them
        from calipers.engine.job import check_arguments

        inputs = {"model": model, "recipe": recipe, "data": data, "measurements": measurements}
        mistakes.check(check_arguments, inputs, options)
    mistakes.tell()
    from calipers import oneshot

    result = oneshot(source, how, texts, measurements=measurements, **vars(options))
    ignored = None if scheme is None else ignore or list(IGNORED_BY_DEFAULT)
    done = _summary(result, model, data, output, ignored)
    done = replace(done, next=_next(done, data, taken), look=_look(done.output))
    return CommandOutput(done.as_dict(), _view(done))


@dataclass(frozen=True)
class Summary:
    """What was done.

    :param before: bytes of the tensors of the model; None if its files are not at hand
    :param after: bytes of the tensors of the checkpoint
    :param dtype: that of the model; ``forward_dtype`` is what it computed in, if it did
    :param next: the command that judges the checkpoint, on text that calibration has not seen
    :param look: commands that show more of the checkpoint: what each is for → the command
    :param bits_per_weight: of those that are quantized, scales included
    :param worst: the modules that lose most, with the error in dB and what it comes from
    :param errors: weight → ‖Q(W) − W‖ / ‖W‖, the largest first
    :param costs: module → what its static activations and its output lose, where data ran
    :param advice: what to do about static activations that lose too much
    :param better: how weights of few bits that were rounded to nearest would lose less
    """

    model: str
    output: str
    before: int | None
    after: int
    bits_per_weight: float | None
    seconds: float
    pipeline: str
    samples: int
    tokens: int
    quantized: tuple[dict[str, Any], ...]
    worst: tuple[ModuleLoss, ...]
    errors: dict[str, float]
    costs: dict[str, ModuleCosts]
    advice: tuple[str, ...]
    coverage: dict[str, Any]
    has_data: bool
    dtype: str
    forward_dtype: str | None
    better: str = ""
    next: str = ""
    look: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "worst": [loss.as_dict() for loss in self.worst]}


def _summary(
    result: OneshotResult,
    model: str,
    data: str | None,
    output: Path,
    ignored: list[str] | None,
) -> Summary:
    from calipers.checkpoint.headers import size_on_disk
    from calipers.checkpoint.quantized import QuantizedCheckpoint
    from calipers.judging.losses import module_losses

    rows = tuple(result.plan.rows())
    ran_in = result.forward_dtype
    return Summary(
        model=model,
        output=str(output),
        before=None if result.source is None else size_on_disk(result.source),
        after=size_on_disk(output),
        bits_per_weight=QuantizedCheckpoint.open(output).bits_per_weight if rows else None,
        seconds=result.seconds,
        pipeline=result.pipeline,
        samples=result.samples,
        tokens=result.tokens,
        quantized=rows,
        worst=tuple(module_losses(result.errors, result.costs)[:SHOWN]),
        errors=dict(sorted(result.errors.items(), key=lambda pair: -pair[1])),
        costs=dict(result.costs),
        advice=advice_on(result.costs, result.plan, ignored),
        coverage=result.coverage.as_dict(),
        forward_dtype=None if ran_in is None else str(ran_in).removeprefix("torch."),
        dtype=str(result.dtype).removeprefix("torch."),
        has_data=data is not None,
        better=_better(result.plan),
    )


def _better(plan: Plan) -> str:
    """Say what would lose less, where weights of few bits have scales by their extremes alone."""
    plain = [
        spec.observer.name
        for _, spec in plan
        if spec.base_name == "weight"
        and spec.args.num_bits <= _FEW_BITS
        and spec.gathered is None
        and spec.observer is not None
        and spec.observer.name in _BY_EXTREMES
    ]
    if not plain:
        return ""
    return (
        f"{counted(len(plain), 'weight')} rounded to nearest with {listing(dict.fromkeys(plain))}: "
        "--method gptq, or --observer optimal, loses less (both need --data or --measurements)."
    )


_BY_EXTREMES = ("memoryless_minmax", "static_minmax")
_FEW_BITS = 4


def _next(done: Summary, data: str | None, chosen: DataOptions) -> str:
    """Return the command that judges the checkpoint, on text that calibration has not seen.

    If there were fewer samples than calibration wanted, none is left in the data.
    """
    command = ["calipers", "evaluate", done.model, done.output, "--data"]
    used_up = done.tokens and done.samples < chosen.num_samples
    if data is None or data == STANDARD_INPUT or used_up:
        return shlex.join([*command, "HELD_OUT.jsonl"])
    command += [data]
    if done.tokens and (data != DEMO or os.path.exists(data)):
        command += ["--skip", str(done.samples), *_same_samples(chosen)]
    return shlex.join(command)


def _same_samples(chosen: DataOptions) -> list[str]:
    """Return the options under which evaluate cuts the data into the same samples."""
    found = {
        "--seed": chosen.seed or None,
        "--seq-len": chosen.max_seq_length,
        "--text-column": chosen.text_column,
        "--mask": chosen.mask,
        "--tokenizer": chosen.tokenizer,
    }
    words = [str(word) for option in found.items() if option[1] is not None for word in option]
    flags = {True: ["--packing"], False: ["--no-packing"], None: []}
    return [*words, *flags[chosen.packing]]


def _look(output: str) -> dict[str, str]:
    """Return the commands that show more of a checkpoint."""
    return {
        why: shlex.join(["calipers", name, output, *options])
        for name, (why, *options) in _ABOUT_CHECKPOINTS.items()
    }


_ABOUT_CHECKPOINTS = {
    "show": ("What each layer loses",),
    "lint": ("Whether it will load and run elsewhere",),
    "report": ("All of it as a page", "-o", "report.html"),
}


def _view(done: Summary) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    before = "" if done.before is None else f"{format_size(done.before)} → "
    share = f" ({done.after / done.before:.0%})" if done.before else ""
    bits = "" if done.bits_per_weight is None else f", {done.bits_per_weight:.2f} bits per weight"
    head = f"{before}{format_size(done.after)}{share}{bits}, in {done.seconds:.1f} s."
    lines = [*(f"  {line}" for line in _quantized(done)), _about_data(done)]
    lost = activation_lines(done.costs, done.advice)
    commands = {**done.look, "Next, on text that calibration has not seen": done.next}
    return Group(
        Text.assemble(("Written to ", "bold"), (done.output, "bold"), f": {head}"),
        Text("\n".join(lines)),
        *worst_modules(done.worst),
        *([Text("\n".join(lost))] if lost else []),
        *([Text(done.better)] if done.better else []),
        "",
        *(part for why, command in commands.items() for part in _told(why, command)),
    )


def _told(why: str, command: str) -> list[RenderableType]:
    from rich.text import Text

    words = tuple(map(shlex.quote, shlex.split(command)))
    return [Text(f"{why}:", style="bold"), ShellCommand(words)]


_STATES = {"q": "query state", "k": "key state", "v": "value state"}
"""What attention computes with, as it is called beside weights and inputs."""


def _quantized(done: Summary) -> list[str]:
    """Say what was quantized and how, alike tensors together."""
    kinds = Counter(
        (row["tensor"], f"{row['format']} per {row['strategy']}, {row['observer']}")
        for row in done.quantized
    )
    return [
        f"{counted(number, _STATES.get(tensor, tensor))}: {how}"
        for (tensor, how), number in kinds.items()
    ]


def _about_data(done: Summary) -> str:
    if done.pipeline == "measurements":
        return f"Measured on {counted(done.samples, 'sample')}, {done.tokens:,} tokens."
    if done.tokens:
        computed = "" if done.forward_dtype == done.dtype else f", computed in {done.forward_dtype}"
        return f"{counted(done.samples, 'sample')}, {done.tokens:,} tokens seen{computed}."
    return "No data was needed" + (", and --data was not read." if done.has_data else ".")
