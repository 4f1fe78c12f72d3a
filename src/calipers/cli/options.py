"""Options and arguments: how flags are made of options, and what the words on a command line mean.

A command that takes a group, as in ``*, compute: ComputeOptions``, has all of its options that have
flags; ``Annotated[ComputeOptions, Only("device")]`` has some of them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer

from calipers.calibration.named_datasets import DatasetName, load_named
from calipers.checkpoint.location import check_location
from calipers.errors import Call, ConfigurationError, Option
from calipers.options import (
    IGNORED_BY_DEFAULT,
    KEYWORDS,
    CalibrationOptions,
    ComputeOptions,
    DataOptions,
    OptionGroup,
    OutputOptions,
    RecipeOptions,
)
from calipers.runtime.environment import find_launch

if TYPE_CHECKING:
    from calipers.steps import Modifier


class Only:
    """The options of a group that a command has."""

    def __init__(self, *names: str) -> None:
        self.names = names


class Without(Only):
    """The options of a group that a command does not have."""


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The folder or the name of a Hugging Face model, or a .gguf file; 'demo' is the one "
        "that ships.",
    ),
]
Scheme = Annotated[
    str | None,
    typer.Option("--scheme", "-s", metavar="NAME", help="A preset; see 'calipers schemes'."),
]
RecipeFile = Annotated[
    Path | None,
    typer.Option("--recipe", "-r", metavar="FILE", help="A recipe in YAML, instead of --scheme."),
]
Ignored = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore",
        metavar="NAME",
        help="A module, a class or a re: pattern that stays as it is; again for more.  "
        f"[default: {', '.join(IGNORED_BY_DEFAULT)}]",
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        "-d",
        metavar="FILE|NAME",
        help="Text, .jsonl, .json, .parquet, a folder of data, or a data set on the hub: "
        "ORG/NAME[@CONFIG][:SPLIT]; '-' is standard input, 'demo' the standard library of this "
        "Python.",
    ),
]
TrustRemoteCode = Annotated[ComputeOptions, Only("trust_remote_code")]

DEMO = "demo"
STANDARD_INPUT = "-"
_DATA_KINDS = (
    "the path of a text, .jsonl, .json or .parquet file or of a folder of data, the name of a data "
    "set on the hub (ORG/NAME[@CONFIG][:SPLIT]), '-' for standard input, or 'demo'"
)


def group_of(annotation: Any) -> tuple[type[OptionGroup], list[str]] | None:
    """Return the group that a parameter of a command is, and which of its options there are."""
    group, chosen = annotation, Without()
    if get_origin(annotation) is Annotated:
        group, chosen = get_args(annotation)[:2]
    if not (isinstance(group, type) and issubclass(group, OptionGroup)):
        return None
    is_left_out = isinstance(chosen, Without)
    return group, [name for name in group.flags() if (name in chosen.names) != is_left_out]


def option_of(group: type[OptionGroup], name: str, metavar: str = "", text: str = "") -> Any:
    """Return an option of a group as typer declares it.

    :param metavar: what its value is for a command, where that is more special
    :param text: what it does for a command, instead of its documentation in the group
    """
    declared = next(each.metadata for each in fields(group) if each.name == name)
    if not text:
        doc = group.docs()[name]
        text = f"{doc[:1].upper()}{re.sub('`+', '', doc[1:])}."
    return typer.Option(
        *declared["flags"],
        metavar=metavar or declared["metavar"] or None,
        help=text,
        parser=read_number(int) if declared["metavar"] == "N" else None,
    )


def parameters_of(group: type[OptionGroup], names: list[str]) -> Iterator[Parameter]:
    """Return the options of a group as parameters that typer reads."""
    for each in fields(group):
        if each.name in names:
            kind: Any = {"": bool, "N": int}.get(each.metadata["metavar"], str)
            if each.default is None:
                kind = kind | None
            annotation = Annotated[kind, option_of(group, each.name)]
            yield Parameter(
                each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=annotation
            )


def read_number(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of numbers; what is none is passed on, and refused with all that is wrong."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    return read


Overwrite = Annotated[bool, option_of(OutputOptions, "overwrite", text="Replace an existing file.")]


def output_option(metavar: str, text: str) -> Any:
    """Return the option that says where the result of a command goes."""
    return option_of(OutputOptions, "output_dir", metavar, text)


# How messages, which name options of Python functions, name them here

FLAGS = {
    option: flags[0].partition("/")[0]
    for group in (DataOptions, ComputeOptions, CalibrationOptions, RecipeOptions, OutputOptions)
    for option, flags in group.flags().items()
}
FLAGS |= {keyword: FLAGS[option] for keyword, option in KEYWORDS.items()}
FLAGS |= {"dataset": "--data", "output_file": FLAGS["output_dir"], "solvers": "--solver"}
FLAGS |= {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("advice", "budget", "collect", "evaluation", "layers", "measurements", "save_every"),
        *("schemes", "source", "target", "until_stable"),
    )
}
"""Options of functions → options of commands; others have no meaning there."""


def as_typed(term: Option | Call) -> str:
    """Spell an option or a call as it is typed at a command line; in Python, if it cannot be.

    >>> as_typed(Option("overwrite", True)), as_typed(Option("max_seq_length", 128))
    ('--overwrite', '--seq-len 128')
    >>> as_typed(Option("share_inputs", False)), as_typed(Option("padding_side", "up"))
    ('--no-share-inputs', "padding_side='up'")
    """
    if isinstance(term, Call):
        return "calipers plan" if term.name == "plan.table" else str(term)
    flag = FLAGS.get(term.name)
    if flag is None:
        return str(term)
    if term.value is ... or term.value is True:
        return flag
    if term.value is False:
        return f"--no-{flag.removeprefix('--')}"
    return f"{flag} {term.value}"


# What words on a command line stand for


def model_source(name: str) -> str:
    """Return the path or the name of a model; ``demo`` is the one that ships."""
    if name != DEMO or os.path.exists(name):
        check_location(name, gguf=True)
        return name
    from calipers.demo import MODEL

    return str(MODEL)


def data_source(name: str | None, part: Literal["calibration", "evaluation"], use: str = "") -> Any:
    """Return what the functions of Python take as data: a path, a data set, a stream or texts.

    :param part: which texts of the standard library ``demo`` stands for
    :param use: what a command does that cannot do without data
    """
    if name is None:
        if not use:
            return None
        problem = f"The command has no --data to {use}"
        raise ConfigurationError(problem, hint=f"Give {_DATA_KINDS}.")
    if name == STANDARD_INPUT:
        if sys.stdin is not None and find_launch().world_size == 1:
            return sys.stdin.buffer
        problem = "is closed" if sys.stdin is None else "cannot be read by several processes"
        subject = f"Standard input, --data {STANDARD_INPUT},"
        raise ConfigurationError(problem, subject=subject, hint="Give a file of data.")
    if os.path.exists(name):
        return name
    if name == DEMO:
        from calipers.demo.text import library_pieces

        return library_pieces(part)
    named = DatasetName.parse(name)
    if named is None:
        raise ConfigurationError(f"--data '{name}' does not exist", hint=f"Give {_DATA_KINDS}.")
    return load_named(named)


def is_demo(data: str | None) -> bool:
    """Whether data are the texts of the standard library, and no file of that name."""
    return data == DEMO and not os.path.exists(DEMO)


def packed(options: DataOptions, data: str | None) -> DataOptions:
    """Return options that join the texts of ``demo``, which are pieces.

    >>> [packed(DataOptions(), name).packing for name in ("demo", "my.jsonl")]
    [True, None]
    """
    return replace(options, packing=True) if is_demo(data) and options.packing is None else options


def recipe_source(
    scheme: str | None, recipe: Path | None, ignore: list[str] | None
) -> Path | Modifier:
    """Return the file, or the modifier, that the options mean."""
    if (scheme is None) == (recipe is None):
        problem = "neither --scheme nor" if scheme is None else "both --scheme and"
        hint = "Give one of them, such as --scheme W4A16."
        raise ConfigurationError(f"The command has {problem} --recipe", hint=hint)
    if scheme is not None:
        from calipers.steps import QuantizationModifier
        from calipers.steps.choices import preset_name

        return QuantizationModifier(
            scheme=preset_name(scheme),
            ignore=tuple(ignore or IGNORED_BY_DEFAULT),
            unmatched="error" if ignore else "ignore",
        )
    assert recipe is not None
    if ignore:
        hint = "Give it in the recipe."
        raise ConfigurationError("--ignore has no meaning beside --recipe", hint=hint)
    return recipe
