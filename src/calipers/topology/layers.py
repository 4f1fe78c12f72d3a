"""The stack of decoder layers that a model consists of."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from calipers.errors import ConfigurationError, Option

_IN_STACK = re.compile(r"^(.*?)\.?(?<![^.])(\d+)(?:\.|$)")


def decoder_layers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Find the stack of layers that a model consists of: name → layer, in order.

    Where a model has several, as those that see images do, it is the one of its decoder.
    """
    classes = set(getattr(model, "_no_split_modules", None) or ())
    everywhere = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module)
    ]
    decoder = getattr(model, "get_decoder", lambda: None)()
    within = set(decoder.modules()) if isinstance(decoder, torch.nn.Module) else set()
    stacks = [found for found in everywhere if found[1] in within] or everywhere
    named = [(n, m) for n, m in stacks if all(type(layer).__name__ in classes for layer in m)]
    if not (named or stacks):
        raise ConfigurationError(
            "has no ModuleList of layers, so it cannot be calibrated layer by layer",
            subject=type(model).__name__,
            hint="Pass " + Option("pipeline", "basic"),
        )
    name, stack = max(named or stacks, key=lambda found: len(found[1]))
    return {f"{name}.{index}": layer for index, layer in enumerate(stack)}


def layers_of_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the layers of the longest stack that names of modules speak of.

    >>> layers_of_names(["model.layers.0.mlp.experts.0.up_proj", "model.layers.1.mlp", "lm_head"])
    ('model.layers.0', 'model.layers.1')
    """
    stacks: dict[str, set[int]] = {}
    for name in names:
        if match := _IN_STACK.match(name):
            stacks.setdefault(match[1], set()).add(int(match[2]))
    if not stacks:
        return ()
    stack = max(stacks, key=lambda stack: len(stacks[stack]))
    return tuple(f"{stack}.{number}".lstrip(".") for number in sorted(stacks[stack]))
