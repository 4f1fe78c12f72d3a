"""``calipers quantize``."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calipers.checkpoint.output import check_output
from calipers.cli.command import Report, progress
from calipers.cli.losses import advice_on, losses
from calipers.cli.options import (
    ActivationObserver,
    AllowCode,
    BatchSize,
    Data,
    Device,
    Dtype,
    GroupSize,
    Ignored,
    Model,
    Packing,
    RecipeFile,
    Samples,
    Scheme,
    Seed,
    SeqLen,
    TextColumn,
    Tokenizer,
    TrustRemoteCode,
    WeightObserver,
)
from calipers.cli.sources import DEMO, data_source, model_source, packing_for, recipe_source
from calipers.cli.words import size_in_words
from calipers.errors import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers import OneshotResult
    from calipers.calibration.costs import ModuleCosts

Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FOLDER", help="Where the checkpoint goes."),
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
AllExperts = Annotated[
    bool,
    typer.Option(
        "--calibrate-all-experts", help="Let experts see all tokens, not only those sent to them."
    ),
]
ShareInputs = Annotated[
    bool,
    typer.Option(
        "--share-inputs/--no-share-inputs",
        help="Measure a tensor that several modules read once for all.",
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
    observer: WeightObserver = None,
    activation_observer: ActivationObserver = None,
    group_size: GroupSize = None,
    ignore: Ignored = None,
    samples: Samples = 512,
    seq_len: SeqLen = None,
    batch_size: BatchSize = 1,
    packing: Packing = None,
    text_column: TextColumn = None,
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
) -> Report:
    """Quantize a model for vLLM and transformers.

    Writes a checkpoint in the formats of compressed-tensors. If anything fails, none is left.

    Example: calipers quantize demo --scheme W4A16 --observer optimal --data demo -o demo-w4a16
    """
    # First: what is wrong is said before anything is imported.
    inputs = {"model": model, "data": data, "recipe": recipe, "tokenizer": tokenizer}
    check_output(output, overwrite, inputs)
    source, texts = model_source(model), data_source(data, "calibration")
    observers = (observer, activation_observer)
    wanted = recipe_source(scheme, recipe, *observers, ignore, group_size, allow_code)
    from calipers import oneshot

    start = time.monotonic()
    result = oneshot(
        source,
        wanted,
        texts,
        output_dir=output,
        tokenizer=tokenizer,
        num_calibration_samples=samples,
        max_seq_length=seq_len,
        batch_size=batch_size,
        packing=packing_for(data, packing),
        text_column=text_column,
        pipeline=pipeline,  # type: ignore[arg-type]  # it checks
        on_unseen=on_unseen,  # type: ignore[arg-type]  # it checks
        calibrate_all_experts=calibrate_all_experts,
        share_inputs=share_inputs,
        device=device,
        dtype=dtype,  # type: ignore[arg-type]  # it checks
        seed=seed,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        trust_remote_code=trust_remote_code,
        allow_code=allow_code,
        progress=progress(),
    )
    ignored = None if scheme is None else ignore or ["lm_head"]
    done = _summary(result, model, data, output, ignored, time.monotonic() - start)
    same = _same_samples(seed, seq_len, packing, text_column, tokenizer)
    done = replace(done, next=_next(done, data, samples, same))
    return Report(asdict(done), _view(done))


@dataclass(frozen=True)
class Summary:
    """What was done.

    :param before: bytes of the tensors of the model; None if its files are not at hand
    :param after: bytes of the tensors of the checkpoint
    :param dtype: that of the model; ``forward_dtype`` is what it computed in, if it did
    :param next: the command that judges the checkpoint, on text that calibration has not seen
    :param errors: weight → ‖Q(W) − W‖ / ‖W‖, the largest first
    :param costs: module → what its static activations and its output lose, where data ran
    :param advice: what to do about static activations that lose too much
    """

    model: str
    output: str
    before: int | None
    after: int
    seconds: float
    pipeline: str
    samples: int
    tokens: int
    quantized: tuple[dict[str, Any], ...]
    errors: dict[str, float]
    costs: dict[str, ModuleCosts]
    advice: tuple[str, ...]
    coverage: dict[str, Any]
    has_data: bool
    dtype: str
    forward_dtype: str | None
    next: str = ""


def _summary(
    result: OneshotResult,
    model: str,
    data: str | None,
    output: Path,
    ignored: list[str] | None,
    seconds: float,
) -> Summary:
    from calipers.checkpoint.sizes import size_on_disk
    from calipers.checkpoint.source import source_folder

    source = source_folder(result.model)
    notes = json.loads((output / "calipers.json").read_text(encoding="utf-8"))
    return Summary(
        model=model,
        output=str(output),
        before=None if source is None else size_on_disk(source),
        after=size_on_disk(output),
        seconds=seconds,
        pipeline=notes["pipeline"],
        samples=notes["samples"],
        tokens=notes["tokens"],
        quantized=tuple(result.plan.rows()),
        errors=dict(sorted(result.errors.items(), key=lambda pair: -pair[1])),
        costs=dict(result.costs),
        advice=advice_on(result.costs, result.plan, ignored),
        coverage=result.coverage.as_dict(),
        forward_dtype=notes["forward_dtype"],
        dtype=str(result.model.dtype).removeprefix("torch."),
        has_data=data is not None,
    )


def _same_samples(
    seed: int, seq_len: int | None, packing: bool | None, text_column: str | None, tokenizer: Any
) -> list[str]:
    """Return the options under which evaluate cuts the data into the same samples."""
    found = {"--seed": seed or None, "--seq-len": seq_len, "--text-column": text_column}
    found["--tokenizer"] = tokenizer
    words = [str(word) for option in found.items() if option[1] is not None for word in option]
    flags = [] if packing is None else ["--packing" if packing else "--no-packing"]
    return [*words, *flags]


def _next(done: Summary, data: str | None, samples: int, same: list[str]) -> str:
    """Return the command that judges the checkpoint, on text that calibration has not seen.

    :param samples: how many calibration wanted: if there were fewer, none is left in the data
    :param same: the options under which evaluate cuts the data into the same samples
    """
    command = ["calipers", "evaluate", done.model, done.output, "--data"]
    if data is None or (done.tokens and done.samples < samples):
        return shlex.join([*command, "HELD_OUT.jsonl"])
    command += [data]
    if done.tokens and (data != DEMO or os.path.exists(data)):
        command += ["--skip", str(done.samples), *same]
    return shlex.join(command)


def _view(done: Summary) -> RenderableType:
    from rich.text import Text

    before = "" if done.before is None else f"{size_in_words(done.before)} → "
    share = f" ({done.after / done.before:.0%})" if done.before else ""
    lines = [
        f"Written to {done.output}: {before}{size_in_words(done.after)}{share}, "
        f"in {done.seconds:.1f} s.",
        *(f"  {line}" for line in _quantized(done)),
        _about_data(done),
        *losses(done.errors, done.costs, done.advice),
        f"Next, on text that calibration has not seen: {done.next}",
    ]
    return Text("\n".join(lines))


def _quantized(done: Summary) -> list[str]:
    """Say what was quantized and how, alike tensors together."""
    kinds = Counter(
        (row["tensor"], f"{row['format']} per {row['strategy']}, {row['observer']}")
        for row in done.quantized
    )
    return [f"{counted(number, tensor)}: {how}" for (tensor, how), number in kinds.items()]


def _about_data(done: Summary) -> str:
    if done.tokens:
        computed = "" if done.forward_dtype == done.dtype else f", computed in {done.forward_dtype}"
        return f"{counted(done.samples, 'sample')}, {done.tokens:,} tokens seen{computed}."
    return "No data was needed" + (", and --data was not read." if done.has_data else ".")
