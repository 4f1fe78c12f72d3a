"""What quantization cost, and what to do about it, put to people."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from calipers.errors import counted

if TYPE_CHECKING:
    from calipers.modifiers.costs import ActivationCost, ModuleCosts
    from calipers.planning.plan import Plan

SHOWN = 5
Costs = Mapping[str, "ModuleCosts"]


def losses(errors: Mapping[str, float], costs: Costs, advice: Sequence[str]) -> list[str]:
    """Say which modules lose most and, if static activations do, what can be done."""
    return [*_outputs(errors, costs), *_activations(costs, advice)]


def _outputs(errors: Mapping[str, float], costs: Costs) -> list[str]:
    """List the modules whose output suffers most or, where no data ran, whose weights do."""
    known = {name: cost for name, cost in costs.items() if cost.weight is not None}
    if not known:
        worst = sorted(errors.items(), key=lambda pair: -pair[1])[:SHOWN]
        head = "Weights that lost most (without data, what outputs lose is not known):"
        return [head, *(f"  {error:7.2%}  {name}" for name, error in worst)] if worst else []
    ranked = sorted(known.items(), key=lambda pair: -pair[1].worst)[:SHOWN]
    if all(cost.input is None for cost in known.values()):
        head = "Modules whose output suffers most, by the error of their weight:"
        return [head, *(f"  {cost.weight:7.2%}  {name}" for name, cost in ranked)]
    return [
        "Modules whose output suffers most, by the error of their weight, of their static input,",
        "and of that input without its largest values:",
        "   weight    input  typical",
        *(
            "".join(f"  {share:>7}" for share in cost.shares().values()) + f"  {name}"
            for name, cost in ranked
        ),
    ]


def _activations(costs: Costs, advice: Sequence[str]) -> list[str]:
    """List the static activations that lose too much, or say that none does."""
    from calipers.modifiers.costs import COSTLY, costly

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
        "What to do, any of:",
        *(f"  {line}" for line in advice),
    ]


def _row(cost: ActivationCost, name: str) -> str:
    reach = f"{cost.largest:.4g}, {cost.limit:.4g}"
    return (
        f"  {cost.error:7.2%}  {cost.typical_error:7.2%}  {cost.clipped:7.3%}  {reach:14}  {name}"
    )


def advice_on(costs: Costs, plan: Plan, ignored: Sequence[str] | None) -> tuple[str, ...]:
    """Say what to type against static activations that lose too much.

    :param ignored: what ``--ignore`` has already; None if a recipe was given instead of a scheme
    """
    from calipers.modifiers.costs import costly

    bad = list(costly(costs))
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
    if {tensor.observer.name for tensor in tensors if tensor.observer} - {"histogram_mse"}:
        said.append("--activation-observer histogram_mse: the range with the least error")
    kept = "it stays as it is" if len(bad) == 1 else "they stay as they are"
    names = list(dict.fromkeys(name for name, _ in bad))[:SHOWN]
    if not states and ignored is None:
        said.append(f"ignore: [{', '.join(names)}] in the recipe: {kept}")
    elif not states and ignored is not None:
        options = " ".join(f"--ignore {shlex.quote(name)}" for name in [*ignored, *names])
        said.append(f"{options}: {kept}")
    return tuple(said)
