"""``calipers merge``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from calipers.cli.command import CommandOutput
from calipers.cli.measure import Output, Overwrite
from calipers.cli.show import about
from calipers.errors import ConfigurationError
from calipers.files.writing import check_output_file

Files = Annotated[
    list[Path], typer.Argument(metavar="FILE…", help="Files of measurements, two or more.")
]


def merge(files: Files, output: Output, overwrite: Overwrite = False) -> CommandOutput:
    """Make one file of measurements of several, as if all data had run at once.

    They must be of the same model and the same statistics, and of other samples.

    Example: calipers merge first.safetensors second.safetensors -o both.safetensors
    """
    for file in files:
        check_output_file(output, overwrite, {"file": file})
    if len(files) < 2:
        raise ConfigurationError(
            f"The command has {len(files)} file to merge", hint="Give two or more."
        )
    from calipers.errors import MergeError
    from calipers.measurements import Measurements

    found = Measurements.load(files[0])
    for file in files[1:]:
        other = Measurements.load(file)
        try:
            found.merge(other)
        except MergeError as error:
            error.add_place(f"'{file}'")
            raise
    found.save(output, overwrite=overwrite)
    return about(found, output)
