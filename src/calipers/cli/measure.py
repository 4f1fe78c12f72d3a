"""``calipers measure`` and ``calipers merge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calipers.cli.app import CommandOutput, tell
from calipers.cli.options import (
    Data,
    Model,
    Overwrite,
    Without,
    data_source,
    model_source,
    output_option,
    packed,
    read_number,
)
from calipers.cli.show import about
from calipers.errors import ConfigurationError, MergeError, Mistakes, format_size
from calipers.files.writing import check_output_file
from calipers.options import CalibrationOptions, ComputeOptions, DataOptions, MeasureOptions

Output = Annotated[Path, output_option("FILE", "Where the measurements go: a file.")]
Collect = Annotated[
    str,
    typer.Option(
        "--collect",
        metavar="NAME[,NAME…]",
        help="What is collected besides: hessian (of inputs), outputs, attention (queries, keys "
        "and values), sensitivity (of the loss to weights, for 'calipers advise'), or statistics "
        "that packages bring.",
    ),
]
SaveEvery = Annotated[
    float,
    typer.Option(
        "--save-every",
        metavar="SECONDS",
        parser=read_number(float),
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
        parser=read_number(float),
        help="By how much scales and importance may still move with more data.",
    ),
]
Files = Annotated[
    list[Path], typer.Argument(metavar="FILE…", help="Files of measurements, two or more.")
]


def measure(
    model: Model,
    output: Output,
    data: Data = None,
    collect: Collect = "",
    save_every: SaveEvery = 60,
    until_stable: UntilStable = False,
    tolerance: Tolerance = 0.1,
    overwrite: Overwrite = False,
    *,
    taken: DataOptions,
    calibration: Annotated[CalibrationOptions, Without("on_unseen")],
    compute: ComputeOptions,
) -> CommandOutput:
    """Run data through a model once, and keep what was seen in a file.

    The same command goes on where one that was killed has stopped.

    Example: calipers measure demo --data demo --samples 32 -o demo.safetensors
    """
    from calipers.engine import measure as measuring
    from calipers.measurements.sufficiency import check_tolerance

    mistakes, taken = Mistakes(), packed(taken, data)
    options = MeasureOptions(data=taken, compute=compute, calibration=calibration)
    inputs = {"model": model, "data": data, "tokenizer": taken.tokenizer}
    mistakes.check(measuring.check_output, output, overwrite, inputs)
    source = mistakes.check(model_source, model)
    dataset = mistakes.check(data_source, data, "calibration", "measure with")
    tolerance = mistakes.check(check_tolerance, tolerance)
    mistakes.check(measuring.check_arguments, options, collect, save_every)
    mistakes.tell()
    trusted = compute.trust_remote_code
    size = measuring.expected_memory(source, collect, trust_remote_code=trusted)
    tell({"memory": size}, f"Statistics will take about {format_size(size)} of memory.")
    result = measuring.measure(
        source,
        dataset,
        collect=collect,
        output_file=output,
        overwrite=overwrite,
        save_every=save_every,
        until_stable=until_stable and tolerance,
        **vars(options),
    )
    return about(result, output, tolerance, taken.num_samples if until_stable else None)


def merge(files: Files, output: Output, overwrite: Overwrite = False) -> CommandOutput:
    """Make one file of measurements of several, as if all data had run at once.

    They must be of the same model and the same statistics, and of other samples.

    Example: calipers merge first.safetensors second.safetensors -o both.safetensors
    """
    for file in files:
        check_output_file(output, overwrite, {"file": file})
    if len(files) < 2:
        problem = f"The command has {len(files)} file to merge"
        raise ConfigurationError(problem, hint="Give two or more.")
    from calipers.measurements import Measurements

    result = Measurements.load(files[0])
    for file in files[1:]:
        other = Measurements.load(file)
        try:
            result.merge(other)
        except MergeError as error:
            error.add_place(f"'{file}'")
            raise
    result.save(output, overwrite=overwrite)
    return about(result, output)
