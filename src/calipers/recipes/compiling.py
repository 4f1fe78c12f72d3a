"""From a recipe to the plan for a model: every claim settled, every tensor checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from compressed_tensors.quantization import QuantizationScheme

from calipers.errors import RecipeError, nearest
from calipers.planning.checks import available_modules, check_modules, unsupported_modules
from calipers.planning.plan import PROPAGATIONS, Plan, Step
from calipers.planning.specs import SCHEME_FIELDS, ModuleSpec, Requirement, args_for
from calipers.topology.experts import fused_experts, unfuse_experts

if TYPE_CHECKING:
    from calipers.recipes.schema import Recipe


def plan_for(
    model: torch.nn.Module, recipe: Recipe, *, calibrate_all_experts: bool = False
) -> Plan:
    """Compile a recipe for a model, whose fused experts become modules where it quantizes them."""
    fused = {
        name: module
        for name, module in fused_experts(model).items()
        if recipe.targets_experts(name)
    }
    unfuse_experts(model, fused)
    plan = compile_plan(recipe.steps, model)
    for name, module in fused.items():
        if any(planned.startswith(f"{name}.") for planned in plan.names):
            vars(model.get_submodule(name))["calibrate_all_experts"] = calibrate_all_experts
        else:
            model.set_submodule(name, module)
    return plan


def compile_plan(steps: Mapping[str, Step], model: torch.nn.Module) -> Plan:
    """Merge what steps want of a model, which is only looked at.

    :param steps: the steps, each under what messages call it
    """
    claimed: dict[str, ModuleSpec] = {}
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    measured: dict[str, tuple[Requirement, ...]] = {}
    changed: set[str] = set()
    finishing: list[str] = []
    propagation, tunes_layers = PROPAGATIONS[0], False
    for label, step in steps.items():
        wanted = step.plan(model, label)
        propagation = max(propagation, wanted.propagation, key=PROPAGATIONS.index)
        tunes_layers |= wanted.tunes_layers
        if wanted.finishes:
            finishing.append(label)
        for module in wanted.modules:
            known = claimed.get(module.name)
            claimed[module.name] = module if known is None else _merged(known, module)
        for name in {*wanted.measured, *wanted.changed}.difference(order):
            raise RecipeError(
                f"{label} plans for a module '{name}', which {type(model).__name__} does not have",
                meant=nearest(name, order),
            )
        for name, requirements in wanted.measured.items():
            measured[name] = (*measured.get(name, ()), *requirements)
        changed |= set(wanted.changed)
    modules = sorted(claimed.values(), key=lambda module: order[module.name])
    besides = {name: measured[name] for name in sorted(measured, key=order.__getitem__)}
    others = tuple(sorted(changed, key=order.__getitem__))
    plan = Plan(tuple(modules), besides, steps, propagation, others, tunes_layers, tuple(finishing))
    planned = ((label, step.plan_transform(model, plan, label)) for label, step in steps.items())
    transforms = {label: each for label, each in planned if each is not None}
    if not modules and not measured and not changed and not transforms:
        raise RecipeError(
            f"The recipe quantizes nothing in {type(model).__name__}: no module that can be "
            "quantized matches",
            hint=f"{unsupported_modules(model)} {available_modules(model)}".strip(),
        )
    check_modules(model, modules)
    return replace(plan, transforms=transforms)


def _merged(one: ModuleSpec, other: ModuleSpec) -> ModuleSpec:
    """Join the claims of two steps on one Linear module; a tensor that both claim is an error."""
    for tensor in other.tensors:
        present = one.tensor(tensor.base_name)
        if present is not None:
            raise RecipeError(
                f"Both {present.step} and {tensor.step} quantize '{other.name}.{tensor.base_name}'",
                hint="A tensor is quantized once: narrow the targets of one of them, or add the "
                "module to its ignore list",
            )
    assert one.kind == other.kind == "linear"
    args = {
        field: args_for(one.scheme, base) or args_for(other.scheme, base)
        for base, field in SCHEME_FIELDS.items()
    }
    same = one.scheme.targets == other.scheme.targets
    targets = list(one.scheme.targets) if same else [one.name]
    fmt = one.scheme.format or other.scheme.format
    scheme = QuantizationScheme(targets=targets, format=fmt, **args)
    by_name = {tensor.base_name: tensor for tensor in (*one.tensors, *other.tensors)}
    tensors = tuple(by_name[base] for base in SCHEME_FIELDS if base in by_name)
    return ModuleSpec(one.name, scheme, tensors, one.kind, one.columns)
