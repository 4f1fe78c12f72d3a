"""Checks before any data runs: patterns that match nothing, tensors that cannot be quantized."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from compressed_tensors.utils import get_head_dim, get_num_attn_heads, get_num_kv_heads
from compressed_tensors.utils.match import is_match

from calipers.errors import (
    CalipersWarning,
    Fields,
    LayoutError,
    Option,
    RecipeError,
    counted,
    group_sizes_for,
    joined,
    listing,
    nearest,
    shortened,
    sizes_that_divide,
    unfit,
)
from calipers.numerics.layout import indivisible_by
from calipers.planning.specs import ModuleSpec, has_free_groups

if TYPE_CHECKING:
    from typing_extensions import Unpack

Unmatched = Literal["error", "warn", "ignore"]
"""What a pattern that matches nothing leads to."""

_SHOWN_NAMES = 6


def matches(model: torch.nn.Module, pattern: str) -> list[str]:
    """Return the names of the modules that a pattern means, in the model's order."""
    return [name for name, module in model.named_modules() if is_match(name, module, pattern)]


def check_patterns(
    model: torch.nn.Module, key: str, patterns: Iterable[str], unmatched: Unmatched
) -> None:
    """Refuse patterns that match nothing, or warn of them.

    :param key: where the patterns stand, for the message
    """
    if unmatched == "ignore":
        return
    known = {type(module).__name__ for module in model.modules()}
    known |= {name for name, _ in model.named_modules() if name}
    for pattern in patterns:
        if matches(model, pattern):
            continue
        what = f"'{pattern}' matches no module of {type(model).__name__}"
        available = available_modules(model)
        if any(name.endswith(f".{pattern}") for name in known):
            in_full = f"Names are given in full, or as 're:.*{re.escape(pattern)}'."
            report(what, unmatched, where=key, hint=f"{in_full} {available}")
        else:
            meant = None if pattern.startswith("re:") else nearest(pattern, known)
            report(what, unmatched, where=key, meant=meant, hint=available)


def report(what: str, unmatched: Unmatched, **fields: Unpack[Fields]) -> None:
    """Raise, warn of, or pass over a pattern that matches nothing."""
    if unmatched == "error":
        error = RecipeError(what, **fields)
        error.add_hint("With 'unmatched: warn' or 'unmatched: ignore' this is no error")
        raise error
    if unmatched == "warn":
        warnings.warn(CalipersWarning(what, **fields), stacklevel=4)


def available_modules(model: torch.nn.Module) -> str:
    """Say in short which classes and names a model has.

    >>> available_modules(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    'Its classes: Linear, Sequential. Some of its names: 0, 1.'
    """
    classes = sorted({type(module).__name__ for module in model.modules()})
    leaves = [name for name, module in model.named_modules() if name and not any(module.children())]
    return (
        f"Its classes: {shortened(classes, _SHOWN_NAMES)}. "
        f"Some of its names: {shortened(leaves, _SHOWN_NAMES)}."
    )


def unsupported_modules(model: torch.nn.Module) -> str:
    """Say which classes with matrices a model has that cannot be quantized; nothing if none.

    >>> unsupported_modules(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Bilinear(2, 2, 2)))
    'Linear and Embedding modules can be quantized; it has 1 Bilinear, which is not supported.'
    """
    found = Counter(
        type(module).__name__
        for module in model.modules()
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        and getattr(getattr(module, "weight", None), "ndim", 0) > 1
    )
    if not found:
        return ""
    has = " and ".join(f"{number} {name}" for name, number in sorted(found.items()))
    are = "is" if found.total() == 1 else "are"
    return (
        f"Linear and Embedding modules can be quantized; it has {has}, which {are} not supported."
    )


_SHOWN_TENSORS = 5
_HEADS: dict[str, Callable[[Any], int]] = {
    "num_attention_heads": get_num_attn_heads,
    "num_key_value_heads": get_num_kv_heads,
    "head_dim": get_head_dim,
}
"""What compressed-tensors asks a config for, to shape the scales of attention states."""


def check_modules(model: torch.nn.Module, planned: Sequence[ModuleSpec]) -> None:
    """Refuse modules and tensors that cannot be quantized as planned."""
    named = dict(model.named_modules())
    modules = {each.name: named[each.name] for each in planned}
    quantized = [
        name
        for name, module in modules.items()
        if getattr(module, "quantization_scheme", None) is not None
    ]
    if quantized:
        raise RecipeError(
            f"{'is' if len(quantized) == 1 else 'are'} already quantized (has a "
            "quantization_scheme)",
            subject=shortened(f"'{name}'" for name in quantized),
            hint="Start from the unquantized model, or ignore these modules",
        )
    attention = next((each for each in planned if each.kind != "linear"), None)
    if attention is not None:
        # Ask compressed-tensors for the shape of attention states now, not after all the data.
        missing = []
        for name, find in _HEADS.items():
            try:
                find(cast("Any", model).config.get_text_config(decoder=True))
            except Exception:  # it promises no kind of error
                missing.append(name)
        if missing:
            raise unfit(
                attention.name,
                "/".join(tensor.base_name for tensor in attention.tensors),
                "compressed-tensors does not find the shape of the attention states of "
                f"{type(model).__name__}: its config does not tell {listing(missing)}",
                hint="Its queries, keys and values cannot be quantized",
            )
    for each in planned:
        if each.tensor("input") and isinstance(modules[each.name], torch.nn.Embedding):
            problem = "the input of an Embedding is token ids"
            raise unfit(each.name, "input", problem, hint="Quantize its weights only")
    _check_divisibility(modules, planned)


def _check_divisibility(modules: dict[str, torch.nn.Module], planned: Sequence[ModuleSpec]) -> None:
    """Refuse tensors that groups or blocks do not divide; name sizes that fit all weights."""
    lines: list[str] = []
    grouped: list[int] = []  # the sizes that groups cut, where another size can be chosen
    for each in planned:
        for tensor in each.tensors:
            if tensor.base_name in ("q", "k", "v"):
                continue
            module = modules[each.name]
            if isinstance(module, torch.nn.Embedding):
                size = module.embedding_dim
            else:
                assert isinstance(module, torch.nn.Linear)
                is_output = tensor.base_name == "output"
                size = module.out_features if is_output else module.in_features
            width = indivisible_by(size, tensor.args)
            if width is not None:
                lines.append(
                    f"  {each.name}, {tensor.base_name}: {size} is not divisible by {width}. "
                    f"{sizes_that_divide(size)}."
                )
            if tensor.base_name == "weight" and has_free_groups(tensor.args):
                grouped.append(size)
            elif width is not None:
                grouped.append(1)  # no other size helps here
    if not lines:
        return
    head = f"The group or block size of the recipe does not divide {counted(len(lines), 'tensor')}:"
    rest = len(lines) - _SHOWN_TENSORS
    more = [f"  and {rest} more"] if rest > 0 else []
    hint: str = "Choose another scheme, or ignore these modules"
    group_sizes = sorted(group_sizes_for(math.gcd(*grouped)), reverse=True)
    if group_sizes:
        sizes = joined(", ", (Option("group_size", size) for size in group_sizes))
        hint = "Sizes that fit every weight: " + sizes + ". Choose one, or ignore these modules"
    raise LayoutError("\n".join([head, *lines[:_SHOWN_TENSORS], *more]), hint=hint)
