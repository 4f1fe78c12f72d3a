"""Which modules of a model a recipe's patterns mean."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import torch
from compressed_tensors.utils.match import is_match

from calipers.errors import CalipersWarning, Fields, RecipeError, Words, nearest, shortened

if TYPE_CHECKING:
    from typing_extensions import Unpack

Unmatched = Literal["error", "warn", "ignore"]
"""What a pattern that matches nothing leads to."""

_SHOWN = 6


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
        f"Its classes: {shortened(classes, _SHOWN)}. "
        f"Some of its names: {shortened(leaves, _SHOWN)}."
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
