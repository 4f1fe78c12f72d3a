"""``calipers observers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.command import Report
from calipers.cli.options import AllowCode
from calipers.cli.tables import facts_table, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers.cli.portraits import Portrait

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The observer to tell all about.", show_default=False),
]


def observers(name: Name = None, allow_code: AllowCode = False) -> Report:
    """List the observers and when to use each, or tell all about one.

    Example: calipers observers optimal
    """
    from calipers.cli.portraits import Portrait
    from calipers.observers import Observer

    if name is not None:
        one = Portrait.of(Observer.get_value_from_registry(name, allow_code=allow_code))
        return Report(one.as_dict(), _single(one))
    known = Observer.registered_names()
    all_ = [Portrait.of(Observer.get_value_from_registry(each, allow_code=False)) for each in known]
    return Report([each.as_dict() for each in all_], _list(all_))


def _list(portraits: list[Portrait]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    rows = table("name", "what it does", "when to use it")
    for each in portraits:
        rows.add_row(each.name, Text(each.does), Text(each.when))
    end = (
        "In one sentence: optimal for weights, histogram_mse for static activations. Where a model "
        "has massive activations, no static int8 range serves: make them dynamic."
    )
    also = [
        f"{alias} is another name of {each.name}." for each in portraits for alias in each.aliases
    ]
    end = "\n".join([*also, end])
    return Group(rows, Text(f"{end}\nMore about one: calipers observers NAME"))


def _single(portrait: Portrait) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    options = table("option", "type", "default", "meaning")
    for each in portrait.options:
        options.add_row(*(Text(str(each[key])) for key in ("name", "type", "default", "meaning")))
    facts = facts_table(portrait.facts())
    return Group(Text(portrait.does), "", facts, options, Text(f"Example: {portrait.example}"))
