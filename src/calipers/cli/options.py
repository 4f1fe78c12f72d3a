"""The arguments that several commands share, and options as ``calipers.options`` declares them.

A command that takes a group, as in ``*, compute: ComputeOptions``, has all of its options that have
flags; ``Annotated[ComputeOptions, Only("device")]`` has some of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from calipers.options import IGNORED_BY_DEFAULT, ComputeOptions, OptionGroup, RecipeOptions


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
AllowCode = Annotated[RecipeOptions, Only("allow_code")]
GroupSize = Annotated[RecipeOptions, Only("group_size")]


def group_of(annotation: Any) -> tuple[type[OptionGroup], list[str]] | None:
    """Return the group that a parameter of a command is, and which of its options there are."""
    chosen: list[Any] = []
    if get_origin(annotation) is Annotated:
        annotation, *chosen = get_args(annotation)
    if not (isinstance(annotation, type) and issubclass(annotation, OptionGroup)):
        return None
    names = list(annotation.flags())
    for each in chosen:
        names = [n for n in names if (n in each.names) != isinstance(each, Without)]
    return annotation, names


def parameters_of(group: type[OptionGroup], names: list[str]) -> Iterator[Parameter]:
    """Return the options of a group as parameters that typer reads."""
    docs = group.docs()
    for each in fields(group):  # type: ignore[arg-type]
        if each.name in names:
            flags, metavar = each.metadata["flags"], each.metadata["metavar"]
            kind: Any = {"": bool, "N": int}.get(metavar, str)
            option = typer.Option(
                *flags,
                metavar=metavar or None,
                help=_sentence(docs[each.name]),
                parser=read_number(int) if metavar == "N" else None,
            )
            if each.default is None:
                kind = kind | None
            annotation = Annotated[kind, option]
            yield Parameter(
                each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=annotation
            )


def _sentence(doc: str) -> str:
    """Return the documentation of an option as the help of a flag.

    >>> _sentence("whether code may run, such as ``x``")
    'Whether code may run, such as x.'
    """
    return doc[:1].upper() + re.sub("`+", "", doc[1:]) + "."


def read_number(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return what reads a number; what is none is passed on, and refused with all that is wrong."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    return read
