"""Another group size, or other observers, for whatever a recipe quantizes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from calipers.errors import (
    CalipersWarning,
    ConfigurationError,
    GroupSizeError,
    Option,
    RecipeError,
    not_allowed,
)
from calipers.modifiers import Modifier
from calipers.modifiers.choices import ObserverChoice, read_choice

Modifiers = tuple[Modifier, ...]


def regroup(modifiers: Modifiers, size: int) -> Modifiers:
    """Give every weight whose groups are free groups of this size; if there is none, refuse."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise not_allowed("group_size", size, "a whole number, 1 or more")
    changed = [modifier.regrouped(size) for modifier in modifiers]
    if not any(changed):
        raise GroupSizeError(size, _weights(modifiers))
    return tuple(new or old for new, old in zip(changed, modifiers, strict=True))


def observe(modifiers: Modifiers, key: str, given: Any) -> Modifiers:
    """Let another observer watch: ``key`` is weight_observer or activation_observer."""
    choice = _read(key, given)
    changed = [modifier.observed_by(key, choice) for modifier in modifiers]
    if not any(changed):
        told = CalipersWarning(
            "has no effect: what it would watch is not quantized, or is dynamic (its scale is "
            "found while the model runs)",
            subject=Option(key, choice.name),
        )
        warnings.warn(told, stacklevel=4)
    return tuple(new or old for new, old in zip(changed, modifiers, strict=True))


def _read(key: str, given: Any) -> ObserverChoice:
    try:
        return read_choice(given)
    except RecipeError as error:
        raise RecipeError(error.problem, where=Option(key)) from None
    except ConfigurationError as error:
        raise RecipeError(error.context.text, where=Option(key)) from None


def _weights(modifiers: Iterable[Modifier]) -> list[str]:
    """Say how the weights of a recipe are cut, each way once."""
    return list(dict.fromkeys(way for modifier in modifiers for way in modifier.weight_formats()))
