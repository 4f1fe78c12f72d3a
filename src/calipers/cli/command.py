"""What all commands share: ``--json``, ``--debug``, how results and errors are shown."""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO

import typer

from calipers.cli.options import group_of, parameters_of
from calipers.cli.spelling import as_typed
from calipers.errors import CalipersError, CalipersWarning, printable
from calipers.options import ComputeOptions, OptionGroup
from calipers.runtime.environment import is_first_process

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from calipers.runtime.progress import Phase, Progress

EXIT_CODES = "Exit codes: 0 done, 2 wrong input, 130 interrupted, others: something failed."
OUR_BUG = 70

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@dataclass(frozen=True)
class CommandOutput:
    """What a command has to say: as plain data for machines, and as a view for people.

    :param exit_code: of a command that has done its work, and found something wrong
    """

    data: Any
    view: RenderableType
    exit_code: int = 0


Command = Callable[..., CommandOutput]

_as_json: ContextVar[bool] = ContextVar("as_json", default=False)


def add_to(app: typer.Typer, command: Command, name: str = "") -> None:
    """Make a function a command; the last paragraph of its docstring is an example.

    The function returns a :class:`CommandOutput`. Here it gets ``--json`` and ``--debug``, its
    output is printed, and an error becomes a sentence and an exit code.
    """
    text, _, example = inspect.cleandoc(command.__doc__ or "").rpartition("\n\nExample: ")
    app.command(name or command.__name__, help=text, epilog=f"\b\nExample:\n  {example}")(
        _wrapped(command)
    )


def _wrapped(command: Command) -> Callable[..., None]:
    signature = inspect.signature(command, eval_str=True)
    groups = {
        each.name: found
        for each in signature.parameters.values()
        if (found := group_of(each.annotation)) is not None
    }

    @functools.wraps(command)
    def run(*, as_json: bool, debug: bool, **given: Any) -> None:
        _as_json.set(as_json)
        with _report_errors(as_json, debug), _report_warnings(as_json):
            for name, (kind, options) in groups.items():
                given[name] = _made(kind, {option: given.pop(option) for option in options})
            output = command(**given)
            show(output)
            if output.exit_code:
                raise typer.Exit(output.exit_code)

    plain = [each for each in signature.parameters.values() if each.name not in groups]
    grouped = [each for group in groups.values() for each in parameters_of(*group)]
    parameters = [*plain, *grouped, _flag("as_json", Json), _flag("debug", Debug)]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None
    )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run


def _made(kind: type[OptionGroup], values: dict[str, Any]) -> OptionGroup:
    """Return a group with the options that were typed, and what shows how far a command is."""
    defaults = kind().values()
    given = {name: value for name, value in values.items() if value != defaults[name]}
    return kind(**given, **({"progress": progress()} if kind is ComputeOptions else {}))


def _flag(name: str, kind: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)


def show(output: CommandOutput) -> None:
    """Print what a command has to say, once for all processes."""
    if not is_first_process():
        return
    if _as_json.get():
        _print_json(output.data, sys.stdout, indent=2)
    else:
        console().print(output.view)


def console(*, for_errors: bool = False) -> Console:
    """Return what people read: the terminal, or a pipe, whose reader wants whole lines."""
    from calipers.runtime.terminal import SafeConsole

    stream = sys.stderr if for_errors else sys.stdout
    return SafeConsole(
        stderr=for_errors,
        width=None if stream.isatty() or "COLUMNS" in os.environ else 1000,
        color_system=None if _is_plain() else "auto",
    )


def _print_json(data: Any, stream: TextIO, indent: int | None = None) -> None:
    """Print plain data; of its strings, what could steer a terminal is escaped."""
    lines = json.dumps(data, indent=indent, ensure_ascii=False).split("\n")
    print("\n".join(map(_escaped, lines)), file=stream, flush=True)


def _escaped(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else json.dumps(each)[1:-1] for each in line)


def tell(data: Mapping[str, Any], text: str) -> None:
    """Say on standard error what has been found so far, once for all processes."""
    if not is_first_process():
        return
    if _as_json.get():
        _print_json(data, sys.stderr)
    else:
        from rich.text import Text

        console(for_errors=True).print(Text(text))


def progress() -> Progress:
    """Return what shows how far a command is: bars, or lines for a log, as JSON if so wanted."""
    from calipers.runtime.progress import Progress

    return Progress(write=_write_progress if _as_json.get() else None)


def _write_progress(phases: Sequence[Phase]) -> None:
    found = [phase.as_dict() for phase in phases]
    _print_json({"progress": found}, sys.stderr)


def shows_bars() -> bool:
    """Whether a person looks at standard error, at a terminal that can move its cursor."""
    from calipers.runtime.progress import can_draw_bars

    return can_draw_bars()


def _is_plain() -> bool:
    from calipers.runtime.progress import is_plain

    return is_plain()


@contextmanager
def _report_errors(as_json: bool, debug: bool) -> Iterator[None]:
    """Turn what goes wrong into a sentence on standard error and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            print(printable("".join(traceback.format_exception(error))), file=sys.stderr)
        if _came_from_interrupt(error):
            raise KeyboardInterrupt from error  # main has the words for it
        _fail(error, *_message_of(error), as_json)


def _message_of(error: BaseException) -> tuple[str, int]:
    """Return a sentence for a user, and the exit code."""
    if isinstance(error, CalipersError):
        return error.spelt(as_typed), error.exit_code
    told = f"{type(error).__name__}: {error}".rstrip(".")
    return f"{told}. This looks like a bug of Calipers; --debug shows more.", OUR_BUG


def _came_from_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C is at the root: libraries say that they cannot be imported when it comes."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _fail(error: BaseException, text: str, code: int, as_json: bool) -> NoReturn:
    if as_json:
        told: dict[str, Any] = {"type": type(error).__name__, "message": text, "exit_code": code}
        if isinstance(error, CalipersError):
            told["context"] = error.context.as_dict(as_typed)
        _print_json({"error": told}, sys.stderr)
    else:
        _print_message("Error", text, "bold red")
    raise typer.Exit(code) from error


@contextmanager
def _report_warnings(as_json: bool) -> Iterator[None]:
    """Show our warnings as sentences on standard error; those of libraries are for developers."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("COMPRESSED_TENSORS_LOG_LEVEL", "ERROR")
    if not shows_bars():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", CalipersWarning)
        warnings.showwarning = functools.partial(_show_warning, as_json)
        yield


def _show_warning(as_json: bool, message: Warning | str, *_: Any, **__: Any) -> None:
    text = message.spelt(as_typed) if isinstance(message, CalipersWarning) else str(message)
    if as_json:
        _print_json({"warning": text}, sys.stderr)
    else:
        _print_message("Warning", text, "bold yellow")


def _print_message(kind: str, text: str, style: str) -> None:
    """Print a sentence to standard error."""
    from rich.text import Text

    console(for_errors=True).print(Text.assemble((f"{kind}: ", style), text))
