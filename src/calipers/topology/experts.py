"""The modules of a model that hold experts: stacked in parameters, or as modules of their own."""

from __future__ import annotations

from torch import nn

from calipers.topology.names import EXPERT_PROJECTIONS
from calipers.topology.stacks import is_fused


def fused_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules of a model that keep several experts in one parameter, by name.

    These are the ones that unfuse_experts swaps or refuses; nothing is changed.
    """
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if is_fused(name, module)}


def unfused_experts(model: nn.Module) -> dict[str, int]:
    """Return the modules whose children are experts, with the number of these."""
    _, *needed = EXPERT_PROJECTIONS  # a gate is not in every model
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        experts = {key: child for key, child in module.named_children() if key.isdecimal()}
        if experts and all(
            key == str(i) and all(hasattr(expert, part) for part in needed)
            for i, (key, expert) in enumerate(experts.items())
        ):
            counts[name] = len(experts)
    return counts
