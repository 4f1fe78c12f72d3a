"""``calipers observers``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from calipers.cli.app import CommandOutput
from calipers.cli.options import Only
from calipers.cli.rendering import facts_table, table
from calipers.options import RecipeOptions

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers.cli.observer_info import ObserverInfo

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="The observer to tell all about."),
]


def observers(
    name: Name = None, *, changes: Annotated[RecipeOptions, Only("allow_code")]
) -> CommandOutput:
    """List the observers and when to use each, or tell all about one.

    Example: calipers observers optimal
    """
    from calipers.cli.observer_info import ObserverInfo
    from calipers.observers import Observer

    if name is not None:
        observer = Observer.get_value_from_registry(name, allow_code=changes.allow_code)
        info = ObserverInfo.of(observer)
        return CommandOutput(info.as_dict(), _view(info))
    known = [ObserverInfo.of(observer) for _, observer in sorted(Observer.registry.parts())]
    rows = table("name", "what it does", "when to use it")
    for info in known:
        rows.add_row(info.name, info.does, info.when)
    view: list[RenderableType] = [
        rows,
        *(f"{alias} is another name of {info.name}." for info in known for alias in info.aliases),
        "In one sentence: optimal for weights, histogram_mse for static activations. Where a model "
        "has massive activations, no static int8 range serves: make them dynamic.",
        "More about one: calipers observers NAME",
    ]
    return CommandOutput([info.as_dict() for info in known], view)


def _view(info: ObserverInfo) -> list[RenderableType]:
    facts = {"also called": ", ".join(info.aliases)} if info.aliases else {}
    facts |= {
        "remembers": info.remembers,
        "when": info.when,
        "watches": ", ".join(info.watches),
        "merges": info.merges,
    }
    options = table("option", "type", "default", "meaning")
    for each in info.options:
        options.add_row(*(str(each[key]) for key in ("name", "type", "default", "meaning")))
    return [info.does, "", facts_table(facts), options, f"Example: {info.example}"]
