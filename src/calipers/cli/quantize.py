"""``calipers quantize``."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.checkpoint.output import check_output
from calipers.cli.charts import ShellCommand
from calipers.cli.command import CommandOutput
from calipers.cli.formatting import format_size
from calipers.cli.losses import SHOWN, activation_lines, advice_on, worst_modules
from calipers.cli.mistakes import Mistakes
from calipers.cli.options import (
    ActivationObserver,
    AllExperts,
    AllowCode,
    BatchSize,
    Data,
    Device,
    Dtype,
    GroupSize,
    Ignored,
    Mask,
    Method,
    Model,
    Packing,
    RecipeFile,
    Samples,
    Scheme,
    Seed,
    SeqLen,
    ShareInputs,
    TextColumn,
    Tokenizer,
    TrustRemoteCode,
    WeightObserver,
)
from calipers.cli.sources import (
    DEMO,
    STANDARD_INPUT,
    compute_options,
    data_options,
    data_source,
    model_source,
    packing_for,
    recipe_source,
)
from calipers.errors import ConfigurationError, counted, listing
from calipers.options import (
    CalibrationOptions,
    DataOptions,
    OneshotOptions,
    OutputOptions,
    RecipeOptions,
)
from calipers.runtime.launch import find_launch

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers import OneshotResult, QuantizeResult
    from calipers.judging.costs import ModuleCosts
    from calipers.judging.losses import ModuleLoss
    from calipers.planning.plan import Plan
    from calipers.recipes import Recipe

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
Pipeline = Annotated[
    str,
    typer.Option(
        "--pipeline",
        metavar="NAME",
        help="How data runs: basic (the whole model), sequential (layer by layer), datafree, auto.",
    ),
]
OnUnseen = Annotated[
    str,
    typer.Option(
        "--on-unseen",
        metavar="NAME",
        help="What becomes of modules that no token reached: error, weights_only, peers.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing checkpoint.")]
ShardSize = Annotated[
    str, typer.Option("--max-shard-size", metavar="SIZE", help="The largest file of tensors.")
]


def quantize(
    model: Model,
    output: Output,
    scheme: Scheme = None,
    recipe: RecipeFile = None,
    data: Data = None,
    measurements: MeasurementsFile = None,
    method: Method = None,
    observer: WeightObserver = None,
    activation_observer: ActivationObserver = None,
    group_size: GroupSize = None,
    ignore: Ignored = None,
    samples: Samples = 512,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    packing: Packing = None,
    text_column: TextColumn = None,
    mask: Mask = None,
    tokenizer: Tokenizer = None,
    pipeline: Pipeline = "auto",
    on_unseen: OnUnseen = "error",
    calibrate_all_experts: AllExperts = False,
    share_inputs: ShareInputs = True,
    device: Device = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    overwrite: Overwrite = False,
    max_shard_size: ShardSize = "5GB",
    trust_remote_code: TrustRemoteCode = False,
    allow_code: AllowCode = False,
) -> CommandOutput:
    """Quantize a model for vLLM and transformers.

    Writes a compressed-tensors checkpoint; if anything fails, none is left. What needs no data, or
    measurements alone, goes from disk to disk; if it is killed, the same command goes on.

    Example: calipers quantize demo --scheme W4A16 --observer optimal --data demo -o demo-w4a16
    """
    mistakes, inputs = Mistakes(), {"model": model, "data": data, "recipe": recipe}
    inputs |= {"tokenizer": tokenizer, "measurements": measurements}
    mistakes.check(check_output, output, overwrite, inputs)
    source = mistakes.check(model_source, model)
    texts = mistakes.check(_texts, data, measurements)
    how = (scheme, recipe, observer, activation_observer, ignore, group_size, method, allow_code)
    wanted = mistakes.check(recipe_source, *how)
    taken = (samples, seq_len, batch_size, packing, seed, text_column, tokenizer, mask)
    chosen = mistakes.check(data_options, *taken)
    compute = mistakes.check(compute_options, device, dtype, trust_remote_code)
    mistakes.check(_check_calibration, pipeline, on_unseen)
    mistakes.tell()
    options = OneshotOptions(
        data=replace(chosen, packing=packing_for(data, packing)),
        compute=compute,
        calibration=_calibration(pipeline, on_unseen, calibrate_all_experts, share_inputs),
        changes=RecipeOptions(allow_code=allow_code),
        output=OutputOptions(output_dir=output, overwrite=overwrite, max_shard_size=max_shard_size),
    )
    result, seconds = _result(source, wanted, texts, measurements, options)
    ignored = None if scheme is None else ignore or ["lm_head"]
    return _output(_summary(result, seconds, model, data, output, ignored), data, chosen)


def _texts(data: str | None, measurements: Path | None) -> Any:
    if measurements is not None and data is not None:
        problem = "The command has both --data and --measurements"
        raise ConfigurationError(problem, hint="Keep one: measurements stand for data.")
    return data_source(data, "calibration")


def _check_calibration(pipeline: str, on_unseen: str) -> None:
    from calipers.engine.job import check_on_unseen, check_pipeline

    mistakes = Mistakes()
    mistakes.check(check_pipeline, pipeline)
    mistakes.check(check_on_unseen, on_unseen)
    mistakes.tell()


def _calibration(
    pipeline: str, on_unseen: str, calibrate_all_experts: bool, share_inputs: bool
) -> CalibrationOptions:
    return CalibrationOptions(
        pipeline=pipeline,  # type: ignore[arg-type]  # checked before
        on_unseen=on_unseen,  # type: ignore[arg-type]  # checked before
        calibrate_all_experts=calibrate_all_experts,
        share_inputs=share_inputs,
    )


def _output(done: Summary, data: str | None, chosen: DataOptions) -> CommandOutput:
    done = replace(done, next=_next(done, data, chosen), look=_look(done.output))
    return CommandOutput(done.as_dict(), _view(done))


def _result(
    source: str, wanted: Recipe, texts: Any, measurements: Path | None, options: OneshotOptions
) -> tuple[OneshotResult | QuantizeResult, float]:
    """Quantize, from disk to disk where the model need not run; how many seconds it took."""
    start = time.monotonic()
    in_memory = find_launch().world_size > 1 or options.data.tokenizer is not None
    if texts is not None or (measurements is None and in_memory):
        from calipers import oneshot

        return oneshot(source, wanted, texts, **options.keywords()), time.monotonic() - start
    from calipers import quantize as from_disk_to_disk

    dtype = options.compute.dtype if measurements is not None else "auto"
    made = from_disk_to_disk(
        source,
        wanted,
        measurements,
        on_unseen=options.calibration.on_unseen,
        compute=replace(options.compute, dtype=dtype),
        changes=options.changes,
        output=options.output,
    )
    return made, time.monotonic() - start


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
    result: OneshotResult | QuantizeResult,
    seconds: float,
    model: str,
    data: str | None,
    output: Path,
    ignored: list[str] | None,
) -> Summary:
    from calipers.checkpoint.quantized import QuantizedCheckpoint
    from calipers.checkpoint.sizes import size_on_disk
    from calipers.judging.losses import module_losses

    notes = json.loads((output / "calipers.json").read_text(encoding="utf-8"))
    rows = tuple(result.plan.rows())
    return Summary(
        model=model,
        output=str(output),
        before=None if result.source is None else size_on_disk(result.source),
        after=size_on_disk(output),
        bits_per_weight=QuantizedCheckpoint.open(output).bits_per_weight if rows else None,
        seconds=seconds,
        pipeline=notes["pipeline"],
        samples=notes["samples"],
        tokens=notes["tokens"],
        quantized=rows,
        worst=tuple(module_losses(result.errors, result.costs)[:SHOWN]),
        errors=dict(sorted(result.errors.items(), key=lambda pair: -pair[1])),
        costs=dict(result.costs),
        advice=advice_on(result.costs, result.plan, ignored),
        coverage=result.coverage.as_dict(),
        forward_dtype=notes["forward_dtype"],
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
