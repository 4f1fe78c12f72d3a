"""From a recipe to the plan for a model, whose stacked experts become modules where need be."""

from __future__ import annotations

import torch

from calipers.calibration.experts import fused_experts, unfuse_experts
from calipers.planning.plan import Plan
from calipers.recipes.schema import Recipe


def plan_for(
    model: torch.nn.Module, recipe: Recipe, *, calibrate_all_experts: bool = False
) -> Plan:
    """Compile a recipe for a model, whose fused experts become modules where it quantizes them."""
    fused = {
        name: module
        for name, module in fused_experts(model).items()
        if recipe.aims_at_experts(name)
    }
    unfuse_experts(model, fused)
    plan = recipe.compile(model)
    parents = {parent for name in plan.names for parent in _parents(name)}
    for name, module in fused.items():
        if name in parents:
            vars(model.get_submodule(name))["calibrate_all_experts"] = calibrate_all_experts
        else:
            model.set_submodule(name, module)
    return plan


def _parents(name: str) -> list[str]:
    """Return the names of the modules that a module is part of.

    >>> _parents("layers.0.mlp")
    ['layers', 'layers.0']
    """
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
