"""What quantization cost, and what to do about it, put to people."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from calipers.errors import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from calipers.judging.activations import ActivationCost
    from calipers.judging.costs import ModuleCosts
    from calipers.judging.losses import ModuleLoss
    from calipers.planning.plan import Plan
    from calipers.planning.specs import TensorSpec

SHOWN = 5
_WHOLE = 42
"""Names up to this length stay on one line, in a terminal of 80 columns, too."""
_CLOSE = 8.0
"""Integers that end within this factor of the largest value can have a range for all of them."""
Costs = Mapping[str, "ModuleCosts"]


def worst_modules(losses: Sequence[ModuleLoss]) -> list[RenderableType]:
    """Return a table of the modules that lose most, and why."""
    from rich.table import Table
    from rich.text import Text

    from calipers.judging.losses import format_decibels

    if not losses:
        return []
    shown = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for side in ("right", "right"):
        shown.add_column(justify=side, no_wrap=True)
    names = [loss.module for loss in losses[:SHOWN]]
    shown.add_column(overflow="fold", no_wrap=max(map(len, names)) <= _WHOLE)
    shown.add_column()
    for loss, module in zip(losses, map(Text, names), strict=False):
        shown.add_row(
            f"  {format_decibels(loss.error)}", f"{loss.error:.2%}", module, Text(_why(loss))
        )
    return ["", Text(_title(losses), style="bold"), shown]


def _title(losses: Sequence[ModuleLoss]) -> str:
    if all(loss.of == "weight" for loss in losses):
        return "Weights that lose most (without data, what outputs lose is not known):"
    return "Modules whose output loses most, and through what:"


def _why(loss: ModuleLoss) -> str:
    return "the error of the weight itself" if loss.of == "weight" else loss.reason


def activation_lines(costs: Costs, advice: Sequence[str]) -> list[str]:
    """List the static activations that lose too much, or say that none does."""
    from calipers.judging.costs import COSTLY, costly

    static = {
        f"{name} {tensor}": cost
        for name, module in costs.items()
        for tensor, cost in module.tensors.items()
    }
    if not static:
        return []
    bad = costly(costs)
    if not bad:
        name = max(static, key=lambda key: static[key].worst)
        return [f"No static activation loses more than {static[name].worst:.2%} ({name})."]
    shown = list(bad.items())[:SHOWN]
    rest = [f"  and {len(bad) - len(shown)} more"] if len(bad) > len(shown) else []
    return [
        f"{counted(len(bad), 'static activation')} of {len(static)} lost more than {COSTLY:.0%} "
        "(typical: without the largest 0.1 % of values):",
        "    error  typical  clipped  largest, range",
        *(_row(cost, f"{name} {tensor}") for (name, tensor), cost in shown),
        *rest,
        _in_words(" ".join(shown[0][0]), shown[0][1]),
        "What to do, any of:",
        *(f"  {line}" for line in advice),
    ]


def _has_better_range(cost: ActivationCost, tensor: TensorSpec) -> bool:
    """Whether a range that loses little is to be expected: none holds a few huge integers."""
    from calipers.judging.costs import COSTLY

    if cost.typical_error > COSTLY:
        return False
    return tensor.format.startswith("float") or cost.largest < _CLOSE * cost.limit


def _in_words(name: str, cost: ActivationCost) -> str:
    """Say what became of the values of a tensor."""
    if cost.typical_error >= cost.error:
        return (
            f"{name}: a few values of up to {cost.largest:.4g} take the whole range, and the "
            f"others lose {cost.typical_error:.0%}."
        )
    return (
        f"{name}: values reach {cost.largest:.4g}, the range ends at {cost.limit:.4g}, and "
        f"{cost.error:.0%} is lost."
    )


def _row(cost: ActivationCost, name: str) -> str:
    reach = f"{cost.largest:.4g}, {cost.limit:.4g}"
    return (
        f"  {cost.error:7.2%}  {cost.typical_error:7.2%}  {cost.clipped:7.3%}  {reach:14}  {name}"
    )


def advice_on(costs: Costs, plan: Plan, ignored: Sequence[str] | None) -> tuple[str, ...]:
    """Say what to type against static activations that lose too much.

    :param ignored: what ``--ignore`` has already; None if a recipe was given instead of a scheme
    """
    from calipers.judging.costs import costly

    found = costly(costs)
    bad = list(found)
    planned = {(module.name, tensor.base_name): tensor for module, tensor in plan}
    tensors = [planned[at] for at in bad if at in planned]
    if not tensors:
        return ()
    formats = {tensor.format.split()[0] for tensor in tensors}
    states = {tensor.base_name for tensor in tensors} <= {"q", "k", "v"}
    said = []
    if states:
        said.append("leave kv_cache_scheme out of the recipe: keys and values stay as they are")
    elif ignored is None:
        said.append("dynamic: true in input_activations of the recipe: a scale for each token")
    else:
        scheme = "FP8_DYNAMIC" if formats == {"float8"} else "W8A8"
        said.append(f"--scheme {scheme}: a scale for each token, found while the model runs")
    if "int8" in formats and not states and ignored is not None:
        said.append("--scheme FP8: static too, but floats keep small values beside large ones")
    others = {tensor.observer.name for tensor in tensors if tensor.observer} - {"histogram_mse"}
    if others and all(_has_better_range(found[at], planned[at]) for at in bad if at in planned):
        said.append("--activation-observer histogram_mse: the range with the least error")
    kept = "it stays as it is" if len(bad) == 1 else "they stay as they are"
    names = list(dict.fromkeys(name for name, _ in bad))[:SHOWN]
    if not states and ignored is None:
        said.append(f"ignore: [{', '.join(names)}] in the recipe: {kept}")
    elif not states and ignored is not None:
        options = " ".join(f"--ignore {shlex.quote(name)}" for name in [*ignored, *names])
        said.append(f"{options}: {kept}")
    return tuple(said)
