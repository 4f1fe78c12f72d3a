"""What all commands share: ``--json``, ``--debug``, how results and errors are shown."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from calipers.errors import CalipersError, CalipersWarning

if TYPE_CHECKING:
    from rich.console import RenderableType

EXIT_CODES = "Exit codes: 0 done, 2 wrong input, 130 interrupted, others: something failed."
INTERRUPTED = 130
OUR_BUG = 70

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class Report:
    """What a command has to say: as plain data for machines, and as a view for people."""

    data: Any
    view: RenderableType


Command = Callable[..., Report]


def add_to(app: typer.Typer, command: Command) -> None:
    """Make a function a command; the last paragraph of its docstring is an example.

    The function returns a :class:`Report`. Here it gets ``--json`` and ``--debug``, its report is
    printed, and an error becomes a sentence and an exit code.
    """
    text, _, example = inspect.cleandoc(command.__doc__ or "").rpartition("\n\nExample: ")
    app.command(command.__name__, help=text, epilog=f"Example: {example}")(_told(command))


def _told(command: Command) -> Callable[..., None]:
    @functools.wraps(command)
    def run(*, as_json: bool, debug: bool, **given: Any) -> None:
        with _errors_in_words(as_json, debug), _warnings_in_words(as_json):
            report = command(**given)
        _print(report, as_json)

    signature = inspect.signature(command, eval_str=True)
    added = [_flag("as_json", Json), _flag("debug", Debug)]
    parameters = [*signature.parameters.values(), *added]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None
    )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _flag(name: str, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(report.data, indent=2, ensure_ascii=False))
        return
    from rich.console import Console

    # Who reads a pipe wants whole lines.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 1000
    Console(width=width).print(report.view)


@contextmanager
def _errors_in_words(as_json: bool, debug: bool) -> Iterator[None]:
    """Turn what goes wrong into a sentence on standard error and an exit code."""
    try:
        yield
    except KeyboardInterrupt as error:
        if debug:
            raise
        _fail("Interrupted. Nothing half-written is left.", INTERRUPTED, error, as_json)
    except CalipersError as error:
        if debug:
            raise
        _fail(as_options(str(error)), error.exit_code, error, as_json)
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        if debug:
            raise
        told = f"{type(error).__name__}: {error}"
        _fail(
            f"{told}. This looks like a bug of Calipers; --debug shows more.",
            OUR_BUG,
            error,
            as_json,
        )


def _fail(text: str, code: int, error: BaseException, as_json: bool) -> NoReturn:
    if as_json:
        told = {"type": type(error).__name__, "message": text, "exit_code": code}
        print(json.dumps({"error": told}, ensure_ascii=False), file=sys.stderr)
    else:
        say("Error", text, "bold red")
    raise typer.Exit(code) from error


@contextmanager
def _warnings_in_words(as_json: bool) -> Iterator[None]:
    """Show our warnings as sentences on standard error; those of libraries are for developers."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", CalipersWarning)
        warnings.showwarning = functools.partial(_show_warning, as_json)
        yield


def _show_warning(as_json: bool, message: Warning | str, *_: Any, **__: Any) -> None:
    text = as_options(str(message))
    if as_json:
        print(json.dumps({"warning": text}, ensure_ascii=False), file=sys.stderr)
    else:
        say("Warning", text, "bold yellow")


def say(kind: str, text: str, style: str = "bold") -> None:
    """Print a sentence to standard error."""
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble((f"{kind}: ", style), text)
    width = None if sys.stderr.isatty() or "COLUMNS" in os.environ else 1000
    Console(stderr=True, width=width).print(line)


_NAMES = {
    "dataset": "data",
    "num_calibration_samples": "samples",
    "num_samples": "samples",
    "max_seq_length": "seq-len",
    "output_dir": "output",
}
_OPTIONS = (
    *("overwrite", "trust_remote_code", "text_column", "pipeline", "batch_size", "max_shard_size"),
    *("calibrate_all_experts", "on_unseen", "tokenizer", "device", "seed", "packing", "shuffle"),
)


def as_options(text: str) -> str:
    """Spell the arguments of Python functions as options of commands.

    >>> as_options("Pass overwrite=True, or dataset=… and max_seq_length=128.")
    'Pass --overwrite, or --data … and --seq-len 128.'
    """
    names = "|".join([*_NAMES, *_OPTIONS])

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip("'\"")
        flag = "--" + _NAMES.get(name, name.replace("_", "-"))
        return flag if value == "True" else f"{flag} {value}"

    return re.sub(rf"\b({names})=('[^']*'|\"[^\"]*\"|\.\.\.|…|[\w.-]*\w)", option, text)
