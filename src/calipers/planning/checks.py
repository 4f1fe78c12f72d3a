"""Checks before any data runs: patterns that match nothing, tensors that cannot be quantized."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from compressed_tensors.utils import get_head_dim, get_num_attn_heads, get_num_kv_heads
from compressed_tensors.utils.match import is_match

from calipers.errors import (
    CalipersWarning,
    Fields,
    LayoutError,
    Option,
    RecipeError,
    Words,
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
from calipers.planning.specs import ModuleSpec, TensorSpec, has_free_groups

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
    for pattern in patterns:
        if not matches(model, pattern):
            what = f"'{pattern}' matches no module of {type(model).__name__}"
            report(what, unmatched, **_advice(model, key, pattern))


def report(what: Words, unmatched: Unmatched, **fields: Unpack[Fields]) -> None:
    """Raise, warn of, or pass over a pattern that matches nothing."""
    if unmatched == "error":
        error = RecipeError(what, **fields)
        error.add_hint("With 'unmatched: warn' or 'unmatched: ignore' this is no error")
        raise error
    if unmatched == "warn":
        warnings.warn(CalipersWarning(what, **fields), stacklevel=4)


def what_there_is(model: torch.nn.Module) -> str:
    """Say in short which classes and names a model has.

    >>> what_there_is(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    'Its classes: Linear, Sequential. Some of its names: 0, 1.'
    """
    classes = sorted({type(module).__name__ for module in model.modules()})
    leaves = [name for name, module in model.named_modules() if name and not any(module.children())]
    return (
        f"Its classes: {shortened(classes, _SHOWN_NAMES)}. "
        f"Some of its names: {shortened(leaves, _SHOWN_NAMES)}."
    )


def what_cannot_be(model: torch.nn.Module) -> str:
    """Say which classes with matrices a model has that cannot be quantized; nothing if none.

    >>> what_cannot_be(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Bilinear(2, 2, 2)))
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


def _advice(model: torch.nn.Module, key: str, pattern: str) -> Fields:
    """Say what was meant by a pattern that matches nothing, or how names are given."""
    known = {type(module).__name__ for module in model.modules()}
    known |= {name for name, _ in model.named_modules() if name}
    there_is = what_there_is(model)
    if any(name.endswith(f".{pattern}") for name in known):
        in_full = f"Names are given in full, or as 're:.*{re.escape(pattern)}'."
        return {"where": key, "hint": f"{in_full} {there_is}"}
    meant = None if pattern.startswith("re:") else nearest(pattern, known)
    return {"where": key, "meant": meant, "hint": there_is}


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
    if any(each.kind != "linear" for each in planned):
        _check_heads(model, next(each for each in planned if each.kind != "linear"))
    for each in planned:
        if each.tensor("input") and isinstance(modules[each.name], torch.nn.Embedding):
            problem = "the input of an Embedding is token ids"
            raise unfit(each.name, "input", problem, hint="Quantize its weights only")
    _check_divisibility(modules, planned)


def _check_heads(model: Any, planned: ModuleSpec) -> None:
    """Ask compressed-tensors for the shape of attention states now, not after all the data."""
    missing = [name for name, find in _HEADS.items() if not _finds(find, model)]
    if missing:
        raise unfit(
            planned.name,
            "/".join(tensor.base_name for tensor in planned.tensors),
            "compressed-tensors does not find the shape of the attention states of "
            f"{type(model).__name__}: its config does not tell {listing(missing)}",
            hint="Its queries, keys and values cannot be quantized",
        )


def _finds(find: Callable[[Any], int], model: Any) -> bool:
    try:
        find(model.config.get_text_config(decoder=True))
    except Exception:  # it promises no kind of error
        return False
    return True


class _Unfit(NamedTuple):
    """A tensor that groups or blocks of a width do not divide."""

    module: str
    base_name: str
    size: int
    width: int


def _check_divisibility(modules: dict[str, torch.nn.Module], planned: Sequence[ModuleSpec]) -> None:
    indivisible: list[_Unfit] = []
    grouped: list[int] = []  # the sizes that groups cut, where another size can be chosen
    for each in planned:
        for tensor in each.tensors:
            found = list(_indivisible(each, modules[each.name], tensor))
            indivisible.extend(found)
            if tensor.base_name == "weight" and has_free_groups(tensor.args):
                grouped.append(_size(modules[each.name], tensor))
            elif found:
                grouped.append(1)  # no other size helps here
    if indivisible:
        raise _not_divided(indivisible, group_sizes_for(math.gcd(*grouped)))


def _not_divided(indivisible: Sequence[_Unfit], group_sizes: Sequence[int]) -> LayoutError:
    """Name the tensors, and sizes that fit all weights."""
    lines = [
        f"  {each.module}, {each.base_name}: {each.size} is not divisible by {each.width}. "
        f"{sizes_that_divide(each.size)}."
        for each in indivisible[:_SHOWN_TENSORS]
    ]
    if len(indivisible) > _SHOWN_TENSORS:
        lines.append(f"  and {len(indivisible) - _SHOWN_TENSORS} more")
    head = "The group or block size of the recipe does not divide"
    told = [f"{head} {counted(len(indivisible), 'tensor')}:", *lines]
    return LayoutError("\n".join(told), hint=_way_out(group_sizes))


def _way_out(group_sizes: Sequence[int]) -> Words:
    if not group_sizes:
        return "Choose another scheme, or ignore these modules"
    sizes = joined(", ", (Option("group_size", size) for size in sorted(group_sizes, reverse=True)))
    return "Sizes that fit every weight: " + sizes + ". Choose one, or ignore these modules"


def _indivisible(
    planned: ModuleSpec, module: torch.nn.Module, tensor: TensorSpec
) -> Iterator[_Unfit]:
    """Yield the tensor with its size and that of its groups, if they do not fit."""
    if tensor.base_name in ("q", "k", "v"):
        return
    size = _size(module, tensor)
    width = indivisible_by(size, tensor.args)
    if width is not None:
        yield _Unfit(planned.name, tensor.base_name, size, width)


def _size(module: torch.nn.Module, tensor: TensorSpec) -> int:
    """Return the size of the dimension that groups cut."""
    if isinstance(module, torch.nn.Embedding):
        return module.embedding_dim
    assert isinstance(module, torch.nn.Linear)
    return module.out_features if tensor.base_name == "output" else module.in_features
