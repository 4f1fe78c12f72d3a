"""The commands, put together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from calipers import __version__
from calipers.cli.advise import advise
from calipers.cli.command import EXIT_CODES, add_to
from calipers.cli.demo import demo
from calipers.cli.doctor import doctor
from calipers.cli.evaluate import evaluate
from calipers.cli.lint import lint
from calipers.cli.measure import measure
from calipers.cli.merge import merge
from calipers.cli.observers import observers
from calipers.cli.plan import plan
from calipers.cli.quantize import quantize
from calipers.cli.report import report
from calipers.cli.schemes import schemes
from calipers.cli.show import show
from calipers.errors import printable

# Typer has a copy of click in it; older versions import the real one.
_UsageError: Any = typer.BadParameter.__base__


class _Group(TyperGroup):
    """All commands. What is said of arguments that they do not take cannot steer a terminal."""

    def make_context(self, *given: Any, **options: Any) -> Any:
        """Read what stands before the command."""
        with _printable_usage_errors():
            return super().make_context(*given, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was named."""
        with _printable_usage_errors():
            return super().invoke(ctx)


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
_COMMANDS = (
    *(quantize, plan, evaluate, lint, report, measure, merge, show, advise),
    *(observers, schemes, doctor, demo),
)
for command in _COMMANDS:
    add_to(app, command)


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
