"""The commands, put together, and what they share: ``--json``, ``--debug``, results and errors."""

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
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperGroup

from calipers import __version__
from calipers.cli.options import as_typed, group_of, parameters_of
from calipers.errors import CalipersError, CalipersWarning, printable
from calipers.options import ComputeOptions
from calipers.registry import Registry
from calipers.runtime.environment import is_first_process
from calipers.runtime.progress import Phase, Progress, can_draw_bars, is_plain

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EXIT_CODES = "Exit codes: 0 done, 2 wrong input, 130 interrupted, others: something failed."
OUR_BUG = 70


@dataclass(frozen=True)
class CommandOutput:
    """The result of a command: as plain data for machines, and as a view for people.

    :param view: what is printed, one thing below the other
    :param exit_code: of a command that has done its work, and found something wrong
    """

    data: Any
    view: RenderableType | list[RenderableType]
    exit_code: int = 0


Command = Callable[..., CommandOutput]

COMMANDS: Registry[Command] = Registry(
    "command",
    "calipers.commands",
    {
        name: f"calipers.cli.{'measure' if name == 'merge' else name}:{name}"
        for name in (
            *("quantize", "plan", "evaluate", "lint", "report", "measure", "merge", "show"),
            *("advise", "observers", "schemes", "doctor", "demo"),
        )
    },
)
"""The commands, in the order of the help; each is imported when it is asked for."""

# Typer has a copy of click in it; older versions import the real one.
_UsageError: Any = typer.BadParameter.__base__

_as_json: ContextVar[bool] = ContextVar("as_json", default=False)


class _Group(TyperGroup):
    """All commands. Usage errors quote arguments, which must not steer a terminal."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names of all commands that can be imported."""
        with _plugin_problems_shown():
            self.commands = {name: _built(name, command) for name, command in COMMANDS.parts()}
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None where there is none, so that the nearest is looked for."""
        if cmd_name not in self.commands:
            with _plugin_problems_shown():
                if cmd_name not in COMMANDS:
                    self.list_commands(ctx)
                    return None
                self.commands[cmd_name] = _built(cmd_name, COMMANDS.get(cmd_name))
        return self.commands[cmd_name]

    def make_context(self, *args: Any, **options: Any) -> Any:
        """Parse what stands before the command."""
        with _printable_usage_errors():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        with _printable_usage_errors():
            return super().invoke(ctx)


@contextmanager
def _plugin_problems_shown() -> Iterator[None]:
    """Show what is wrong with the commands of installed packages as any other warning or error."""
    with _warnings_reported(as_json=False):
        try:
            yield
        except CalipersError as error:
            raise typer.BadParameter(str(error)) from error


@contextmanager
def _printable_usage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, _UsageError):
            error.message = printable(error.message)
        raise


def _built(name: str, command: Command) -> Any:
    """Return a function as a command of its own."""
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    add_to(alone, command, name)
    return typer.main.get_command(alone)


def add_to(app: typer.Typer, command: Command, name: str = "") -> None:
    """Make a function a command; the last paragraph of its docstring is an example.

    The function returns a :class:`CommandOutput`. Here it gets ``--json`` and ``--debug``, its
    groups of options become flags, its output is printed, and an error becomes a sentence and an
    exit code.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {
        each.name: group
        for each in signature.parameters.values()
        if (group := group_of(each.annotation)) is not None
    }

    @functools.wraps(command)
    def run(*, as_json: bool, debug: bool, **values: Any) -> None:
        _as_json.set(as_json)
        with _errors_reported(as_json, debug), _warnings_reported(as_json):
            for name, (kind, options) in groups.items():
                defaults = kind().values()
                typed = {option: values.pop(option) for option in options}
                typed = {key: value for key, value in typed.items() if value != defaults[key]}
                shown = {"progress": progress()} if kind is ComputeOptions else {}
                values[name] = kind(**typed, **shown)
            output = command(**values)
            show(output)
            if output.exit_code:
                raise typer.Exit(output.exit_code)

    switches = {
        "as_json": typer.Option("--json", help="Print the result as JSON."),
        "debug": typer.Option("--debug", help="Show the traceback of an error."),
    }
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        *(each for each in signature.parameters.values() if each.name not in groups),
        *(each for group in groups.values() for each in parameters_of(*group)),
        *(
            inspect.Parameter(key, keyword, default=False, annotation=Annotated[bool, option])
            for key, option in switches.items()
        ),
    ]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=None
    )
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    text, _, example = inspect.cleandoc(command.__doc__ or "").rpartition("\n\nExample: ")
    app.command(name or command.__name__, help=text, epilog=f"\b\nExample:\n  {example}")(run)


# Printing


def show(output: CommandOutput) -> None:
    """Print the result of a command, once for all processes."""
    if not is_first_process():
        return
    if _as_json.get():
        _print_json(output.data, sys.stdout, indent=2)
    else:
        screen = console()
        for part in output.view if isinstance(output.view, list) else [output.view]:
            screen.print(part)


def tell(data: Mapping[str, Any], text: str) -> None:
    """Print an intermediate result to standard error, once for all processes."""
    if is_first_process():
        _print_message(_as_json.get(), data, text)


def progress() -> Progress:
    """Return what shows how far a command is: bars, or lines for a log, as JSON if so wanted."""

    def write(phases: Sequence[Phase]) -> None:
        _print_json({"progress": [phase.as_dict() for phase in phases]}, sys.stderr)

    return Progress(write=write if _as_json.get() else None)


def console(*, for_errors: bool = False) -> Console:
    """Return what people read: the terminal, or a pipe, whose reader wants whole lines."""
    from calipers.runtime.terminal import SafeConsole

    stream = sys.stderr if for_errors else sys.stdout
    return SafeConsole(
        stderr=for_errors,
        width=None if stream.isatty() or "COLUMNS" in os.environ else 1000,
        color_system=None if is_plain() else "auto",
    )


def _print_message(as_json: bool, data: Mapping[str, Any], *text: str | tuple[str, str]) -> None:
    """Print to standard error: a line of JSON, or text in pieces, some of them with a style."""
    if as_json:
        _print_json(data, sys.stderr)
    else:
        from rich.text import Text

        console(for_errors=True).print(Text.assemble(*text))


def _print_json(data: Any, stream: TextIO, indent: int | None = None) -> None:
    """Print plain data; of its strings, what could steer a terminal is escaped."""
    text = json.dumps(data, indent=indent, ensure_ascii=False)
    if not text.replace("\n", "").isprintable():
        marks = (
            mark if mark.isprintable() or mark == "\n" else json.dumps(mark)[1:-1] for mark in text
        )
        text = "".join(marks)
    print(text, file=stream, flush=True)


# Errors and warnings


@contextmanager
def _errors_reported(as_json: bool, debug: bool) -> Iterator[None]:
    """Turn an exception into a sentence on standard error and an exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            print(printable("".join(traceback.format_exception(error))), file=sys.stderr)
        cause: BaseException | None = error
        while cause is not None:
            # Libraries say that they cannot be imported when Ctrl-C comes meanwhile.
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from error  # main has the words for it
            cause = cause.__cause__ or cause.__context__
        name, context = type(error).__name__, {}
        if isinstance(error, CalipersError):
            text, code = error.spelt(as_typed), error.exit_code
            context = {"context": error.context.as_dict(as_typed)}
        else:
            problem, code = f"{name}: {error}".rstrip("."), OUR_BUG
            text = f"{problem}. This looks like a bug of Calipers; --debug shows more."
        data = {"type": name, "message": text, "exit_code": code, **context}
        _print_message(as_json, {"error": data}, ("Error: ", "bold red"), text)
        raise typer.Exit(code) from error


@contextmanager
def _warnings_reported(as_json: bool) -> Iterator[None]:
    """Show our warnings as sentences on standard error; those of libraries are for developers."""

    def show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
        text = message.spelt(as_typed) if isinstance(message, CalipersWarning) else str(message)
        _print_message(as_json, {"warning": text}, ("Warning: ", "bold yellow"), text)

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("COMPRESSED_TENSORS_LOG_LEVEL", "ERROR")
    if not can_draw_bars():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", CalipersWarning)
        warnings.showwarning = show_warning
        yield


app = typer.Typer(
    name="calipers",
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help is there at once, without rich
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Try first: calipers demo. {EXIT_CODES}",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"calipers {__version__}")
        raise typer.Exit


@app.callback()
def calipers(
    _version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Find the scales that lose the least, and quantize language models with them."""
