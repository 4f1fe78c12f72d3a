"""``calipers measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from calipers.cli.command import CommandOutput, tell
from calipers.cli.formatting import format_size
from calipers.cli.mistakes import Mistakes
from calipers.cli.options import (
    AllExperts,
    BatchSize,
    Data,
    Device,
    Dtype,
    Mask,
    Model,
    Packing,
    Samples,
    Seed,
    SeqLen,
    ShareInputs,
    Skip,
    TextColumn,
    Tokenizer,
    TrustRemoteCode,
)
from calipers.cli.show import about
from calipers.cli.sources import (
    DATA_KINDS,
    compute_options,
    data_options,
    data_source,
    model_source,
    packing_for,
)
from calipers.errors import ConfigurationError
from calipers.files.output_file import PARTIAL, check_output_file
from calipers.options import CalibrationOptions


def _number(text: str) -> Any:
    """Read a number; what is none is passed on, and refused with everything else that is wrong."""
    try:
        return float(text)
    except ValueError:
        return text


Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="FILE", help="Where the measurements go: a file."),
]
Collect = Annotated[
    str,
    typer.Option(
        "--collect",
        metavar="NAME[,NAME…]",
        help="What is collected besides: hessian (of inputs), outputs, attention (queries, keys "
        "and values), sensitivity (of the loss to weights, for 'calipers advise').",
    ),
]
Pipeline = Annotated[
    str,
    typer.Option(
        "--pipeline",
        metavar="NAME",
        help="How data runs: basic (the whole model), sequential (layer by layer), auto.",
    ),
]
SaveEvery = Annotated[
    float,
    typer.Option(
        "--save-every",
        metavar="SECONDS",
        parser=_number,
        help="When what was measured is written again, so that a run that dies can go on.",
    ),
]
UntilStable = Annotated[
    bool,
    typer.Option(
        "--until-stable",
        help="Stop as soon as the data suffices: --samples is then the most that is taken.",
    ),
]
Tolerance = Annotated[
    float,
    typer.Option(
        "--tolerance",
        metavar="SHARE",
        parser=_number,
        help="By how much scales and importance may still move with more data.",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing file of measurements.")
]


def measure(
    model: Model,
    output: Output,
    data: Data = None,
    collect: Collect = "",
    samples: Samples = 512,
    skip: Skip = 0,
    seq_len: SeqLen = None,
    batch_size: BatchSize = None,
    packing: Packing = None,
    text_column: TextColumn = None,
    mask: Mask = None,
    tokenizer: Tokenizer = None,
    pipeline: Pipeline = "auto",
    calibrate_all_experts: AllExperts = False,
    share_inputs: ShareInputs = True,
    device: Device = None,
    dtype: Dtype = "auto",
    seed: Seed = 0,
    save_every: SaveEvery = 60,
    until_stable: UntilStable = False,
    tolerance: Tolerance = 0.1,
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
) -> CommandOutput:
    """Run data through a model once, and keep what was seen in a file.

    The same command goes on where one that was killed has stopped.

    Example: calipers measure demo --data demo --samples 32 -o demo.safetensors
    """
    from calipers.engine import measure as measuring

    mistakes, joined = Mistakes(), packing_for(data, packing)
    inputs: dict[str, object] = {"model": model, "data": data, "tokenizer": tokenizer}
    mistakes.check(_check_output, output, overwrite, inputs)
    source = mistakes.check(model_source, model)
    texts = mistakes.check(_texts, data)
    tolerance = mistakes.check(_checked, tolerance)
    mistakes.check(measuring.check_save_every, save_every)
    taken = (samples, seq_len, batch_size, joined, seed, text_column, tokenizer, mask, skip)
    chosen = mistakes.check(data_options, *taken)
    compute = mistakes.check(compute_options, device, dtype, trust_remote_code)
    mistakes.tell()
    size = measuring.expected_memory(source, collect, trust_remote_code=trust_remote_code)
    tell({"memory": size}, f"Statistics will take about {format_size(size)} of memory.")
    found = measuring.measure(
        source,
        texts,
        collect=collect,
        output_file=output,
        overwrite=overwrite,
        save_every=save_every,
        until_stable=until_stable and tolerance,
        data=chosen,
        compute=compute,
        calibration=_calibration(pipeline, calibrate_all_experts, share_inputs),
    )
    return about(found, output, tolerance, samples if until_stable else None)


def _calibration(pipeline: str, all_experts: bool, share_inputs: bool) -> CalibrationOptions:
    return CalibrationOptions(
        pipeline=pipeline,  # type: ignore[arg-type]  # measure checks
        calibrate_all_experts=all_experts,
        share_inputs=share_inputs,
    )


def _check_output(output: Path, overwrite: bool, inputs: dict[str, object]) -> None:
    """Say what is wrong before anything is loaded.

    But a run that was killed may have left something beside its output, which has to be looked at.
    """
    from calipers.measurements.store import check_measurements_file

    if not output.with_name(output.name + PARTIAL).exists():
        check_output_file(output, overwrite, inputs)
    check_measurements_file(output, overwrite=True)


def _checked(tolerance: float) -> float:
    from calipers.measurements.sufficiency import check_tolerance

    return check_tolerance(tolerance)


def _texts(data: str | None) -> Any:
    if data is None:
        problem = "The command has no --data to measure with"
        raise ConfigurationError(problem, hint=f"Give {DATA_KINDS}.")
    return data_source(data, "calibration")
