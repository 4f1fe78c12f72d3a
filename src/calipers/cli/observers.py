"""``calipers observers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.command import CommandOutput
from calipers.cli.options import AllowCode
from calipers.cli.tables import facts_table, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers.cli.observer_info import ObserverInfo

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The observer to tell all about.", show_default=False),
]


def observers(name: Name = None, *, changes: AllowCode) -> CommandOutput:
    """List the observers and when to use each, or tell all about one.

    Example: calipers observers optimal
    """
    from calipers.cli.observer_info import ObserverInfo
    from calipers.observers import Observer

    if name is not None:
        one = ObserverInfo.of(Observer.get_value_from_registry(name, allow_code=changes.allow_code))
        return CommandOutput(one.as_dict(), _single(one))
    known = Observer.registered_names()
    all_ = [
        ObserverInfo.of(Observer.get_value_from_registry(each, allow_code=False)) for each in known
    ]
    return CommandOutput([each.as_dict() for each in all_], _list(all_))


def _list(described: list[ObserverInfo]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    rows = table("name", "what it does", "when to use it")
    for each in described:
        rows.add_row(each.name, Text(each.does), Text(each.when))
    end = (
        "In one sentence: optimal for weights, histogram_mse for static activations. Where a model "
        "has massive activations, no static int8 range serves: make them dynamic."
    )
    also = [
        f"{alias} is another name of {each.name}." for each in described for alias in each.aliases
    ]
    end = "\n".join([*also, end])
    return Group(rows, Text(f"{end}\nMore about one: calipers observers NAME"))


def _single(info: ObserverInfo) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    options = table("option", "type", "default", "meaning")
    for each in info.options:
        options.add_row(*(Text(str(each[key])) for key in ("name", "type", "default", "meaning")))
    facts = facts_table(_facts(info))
    return Group(Text(info.does), "", facts, options, Text(f"Example: {info.example}"))


def _facts(info: ObserverInfo) -> dict[str, str]:
    return {
        **({"also called": ", ".join(info.aliases)} if info.aliases else {}),
        "remembers": info.remembers,
        "when": info.when,
        "watches": ", ".join(info.watches),
        "merges": info.merges,
    }
