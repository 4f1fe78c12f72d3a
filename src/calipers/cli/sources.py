"""What the words on the command line stand for: models, data, recipes, options."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from calipers.calibration.dataset_names import DatasetName
from calipers.checkpoint.location import check_location
from calipers.cli.command import progress
from calipers.cli.mistakes import Mistakes
from calipers.cli.options import observer_choice
from calipers.errors import ConfigurationError, check_whole_number
from calipers.options import ComputeOptions, DataOptions
from calipers.runtime.launch import find_launch

if TYPE_CHECKING:
    from calipers.recipes import Recipe

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
    from calipers.calibration.data.named_datasets import load_named

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


def packing_for(name: str | None, chosen: bool | None) -> bool | None:
    """Return whether texts are joined: those of ``demo`` are pieces of modules.

    >>> packing_for("demo", None), packing_for("demo", False), packing_for("my.jsonl", None)
    (True, False, None)
    """
    return True if chosen is None and name == DEMO and not os.path.exists(name) else chosen


def data_options(
    samples: int,
    seq_len: int | None,
    batch_size: int | None,
    packing: bool | None,
    seed: int,
    text_column: str | None,
    tokenizer: str | None,
    mask: str | None,
    skip: int = 0,
) -> DataOptions:
    """Return which samples are taken, and how they become batches."""
    mistakes = Mistakes()
    for option, number, least in (
        ("num_samples", samples, 1),
        ("max_seq_length", 1 if seq_len is None else seq_len, 1),
        ("batch_size", 1 if batch_size is None else batch_size, 1),
        ("skip", skip, 0),
        ("seed", seed, None),
    ):
        mistakes.check(check_whole_number, option, number, least)
    mistakes.tell()
    return DataOptions(
        tokenizer=tokenizer,
        num_samples=samples,
        max_seq_length=seq_len,
        batch_size=batch_size,
        packing=packing,
        seed=seed,
        skip=skip,
        text_column=text_column,
        mask=mask,  # type: ignore[arg-type]  # whoever reads the data checks
    )


def compute_options(device: str | None, dtype: str, trust_remote_code: bool) -> ComputeOptions:
    """Return where and how a model computes, and what shows how far it is."""
    from calipers.calibration.pipelines import usable_device
    from calipers.runtime.precision import dtype_choice

    mistakes = Mistakes()
    choice = mistakes.check(dtype_choice, dtype)  # type: ignore[arg-type]  # it checks
    mistakes.check(usable_device, device)
    mistakes.tell()
    return ComputeOptions(
        device=device,
        dtype=choice,
        trust_remote_code=trust_remote_code,
        progress=progress(),
    )


def recipe_source(
    scheme: str | None,
    recipe: Path | None,
    observer: str | None,
    activation_observer: str | None,
    ignore: list[str] | None,
    group_size: int | None = None,
    method: str | None = None,
    allow_code: bool = False,
) -> Recipe:
    """Make the recipe that the options mean: method, groups and observers are put on top of it."""
    if (scheme is None) == (recipe is None):
        problem = (
            "neither --scheme nor --recipe" if scheme is None else "both --scheme and --recipe"
        )
        hint = "Give one of them, such as --scheme W4A16."
        raise ConfigurationError(f"The command has {problem}", hint=hint)
    if recipe is not None and ignore:
        hint = "Give it in the recipe."
        raise ConfigurationError("--ignore has no meaning beside --recipe", hint=hint)
    weights, activations = observer_choice(observer), observer_choice(activation_observer)
    from calipers.recipes import load_changed_recipe
    from calipers.steps import QuantizationModifier
    from calipers.steps.choices import preset_name

    source: object = recipe
    if scheme is not None:
        source = QuantizationModifier(
            scheme=preset_name(scheme),
            ignore=tuple(ignore or ["lm_head"]),
            unmatched="error" if ignore else "ignore",
        )
    return load_changed_recipe(
        source,
        method=method,
        group_size=group_size,
        weight_observer=weights,
        activation_observer=activations,
        allow_code=allow_code,
    )
