"""What the words on the command line stand for: models, data, recipes, options."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from calipers.calibration.named_datasets import DatasetName, load_named
from calipers.checkpoint.location import check_location
from calipers.errors import ConfigurationError
from calipers.options import IGNORED_BY_DEFAULT, DataOptions
from calipers.runtime.environment import find_launch

if TYPE_CHECKING:
    from calipers.steps import Modifier

DEMO = "demo"
STANDARD_INPUT = "-"
DATA_KINDS = (
    "the path of a text, .jsonl, .json or .parquet file or of a folder of data, the name of a data "
    "set on the hub (ORG/NAME[@CONFIG][:SPLIT]), '-' for standard input, or 'demo'"
)


def model_source(name: str) -> str:
    """Return the path or the name of a model; ``demo`` is the one that ships."""
    if name != DEMO or os.path.exists(name):
        check_location(name, gguf=True)
        return name
    from calipers.demo import MODEL

    return str(MODEL)


def data_source(name: str | None, part: Literal["calibration", "evaluation"]) -> Any:
    """Return the path of data, or a data set; ``demo`` are the texts of the standard library."""
    if name == STANDARD_INPUT:
        return _standard_input()
    if name is None or os.path.exists(name):
        return name
    if name == DEMO:
        from calipers.demo.text import library_pieces

        return library_pieces(part)
    named = DatasetName.parse(name)
    if named is None:
        raise ConfigurationError(f"--data '{name}' does not exist", hint=f"Give {DATA_KINDS}.")
    return load_named(named)


def _standard_input() -> BinaryIO:
    """Return the stream that ``-`` stands for."""
    problem = None
    if sys.stdin is None:
        problem = "is closed"
    elif find_launch().world_size > 1:
        problem = "cannot be read by several processes"
    if problem is not None:
        subject = f"Standard input, --data {STANDARD_INPUT},"
        raise ConfigurationError(problem, subject=subject, hint="Give a file of data.")
    return sys.stdin.buffer


def packed(taken: DataOptions, data: str | None) -> DataOptions:
    """Return options with which texts are joined where they are pieces: those of ``demo``.

    >>> [packed(DataOptions(), name).packing for name in ("demo", "my.jsonl")]
    [True, None]
    """
    is_demo = data == DEMO and not os.path.exists(DEMO)
    return replace(taken, packing=True) if is_demo and taken.packing is None else taken


def recipe_source(
    scheme: str | None, recipe: Path | None, ignore: list[str] | None
) -> Path | Modifier:
    """Return the file, or the modifier, that the options mean."""
    if (scheme is None) == (recipe is None):
        problem = (
            "neither --scheme nor --recipe" if scheme is None else "both --scheme and --recipe"
        )
        hint = "Give one of them, such as --scheme W4A16."
        raise ConfigurationError(f"The command has {problem}", hint=hint)
    if recipe is not None and ignore:
        hint = "Give it in the recipe."
        raise ConfigurationError("--ignore has no meaning beside --recipe", hint=hint)
    if recipe is not None:
        return recipe
    from calipers.steps import QuantizationModifier
    from calipers.steps.choices import preset_name

    assert scheme is not None
    return QuantizationModifier(
        scheme=preset_name(scheme),
        ignore=tuple(ignore or IGNORED_BY_DEFAULT),
        unmatched="error" if ignore else "ignore",
    )
