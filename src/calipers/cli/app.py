"""The commands, put together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from calipers import __version__
from calipers.cli.command import EXIT_CODES, Command, add_to
from calipers.errors import CalipersError, CalipersWarning, printable
from calipers.registry import Registry

COMMANDS: Registry[Command] = Registry(
    "command",
    "calipers.commands",
    {
        name: f"calipers.cli.{name}:{name}"
        for name in (
            *("quantize", "plan", "evaluate", "lint", "report", "measure", "merge", "show"),
            *("advise", "observers", "schemes", "doctor", "demo"),
        )
    },
)
"""The commands, in the order of the help; each is imported when it is asked for."""

# Typer has a copy of click in it; older versions import the real one.
_UsageError: Any = typer.BadParameter.__base__


class _Group(TyperGroup):
    """All commands. What is said of arguments that they do not take cannot steer a terminal."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """Return the names of all commands that can be imported."""
        with _told_in_a_line():
            self.commands = {name: _built(name, command) for name, command in COMMANDS.parts()}
        return list(self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None where there is none, so that the nearest is looked for."""
        if cmd_name not in self.commands:
            with _told_in_a_line():
                if cmd_name not in COMMANDS:
                    self.list_commands(ctx)
                    return None
                self.commands[cmd_name] = _built(cmd_name, COMMANDS.get(cmd_name))
        return self.commands[cmd_name]

    def make_context(self, *given: Any, **options: Any) -> Any:
        """Read what stands before the command."""
        with _printable_usage_errors():
            return super().make_context(*given, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        with _printable_usage_errors():
            return super().invoke(ctx)


def _built(name: str, command: Command) -> Any:
    """Return a function as a command of its own."""
    alone = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    add_to(alone, command, name)
    return typer.main.get_command(alone)


@contextmanager
def _told_in_a_line() -> Iterator[None]:
    """Tell what is wrong with plug-ins as a person would be told anything else."""

    def tell(message: Warning | str, *_: Any, **__: Any) -> None:
        typer.echo(f"Warning: {printable(str(message))}", err=True)

    with warnings.catch_warnings():
        warnings.simplefilter("default", CalipersWarning)
        warnings.showwarning = tell
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
