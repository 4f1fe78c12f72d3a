"""Which modules of a model a recipe's patterns mean."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from typing import Literal

import torch
from compressed_tensors.utils.match import is_match

from calipers.errors import CalipersWarning, UnmatchedPatternError, did_you_mean, shortened

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
            report(_nothing(model, key, pattern), unmatched)


def report(problem: str, unmatched: Unmatched) -> None:
    """Raise, warn of, or pass over a pattern that matches nothing."""
    if unmatched == "error":
        raise UnmatchedPatternError(
            f"{problem} With 'unmatched: warn' or 'unmatched: ignore' this is no error."
        )
    if unmatched == "warn":
        warnings.warn(problem, CalipersWarning, 4)


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


def _nothing(model: torch.nn.Module, key: str, pattern: str) -> str:
    known = {type(module).__name__ for module in model.modules()}
    known |= {name for name, _ in model.named_modules() if name}
    hint = "" if pattern.startswith("re:") else did_you_mean(pattern, known)
    suffixed = [name for name in sorted(known) if name.endswith(f".{pattern}")]
    if suffixed:
        hint = f" Names are given in full, or as 're:.*{re.escape(pattern)}'."
    return (
        f"{key}: '{pattern}' matches no module of {type(model).__name__}.{hint} "
        f"{what_there_is(model)}"
    )
