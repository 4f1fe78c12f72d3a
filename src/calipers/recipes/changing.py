"""Another method, another group size, or other observers, for whatever a recipe quantizes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from calipers.errors import (
    CalipersWarning,
    ConfigurationError,
    Option,
    RecipeError,
    check_whole_number,
    listing,
    not_allowed,
)
from calipers.steps import Modifier
from calipers.steps.base import steps_by_method
from calipers.steps.choices import ObserverChoice, read_choice

Modifiers = tuple[Modifier, ...]


def round_by(modifiers: Modifiers, method: str) -> Modifiers:
    """Let whoever quantizes weights round them by a method; if there is nobody, refuse."""
    steps = steps_by_method()
    if method not in steps:
        raise not_allowed("method", method, steps)
    changed = [modifier.remade_as(steps[method]) for modifier in modifiers]
    if not any(changed):
        raise RecipeError(
            "has no meaning here: the recipe quantizes no weights",
            subject=Option("method", method),
            hint="Leave it out, or choose a scheme with weights, such as W4A16",
        )
    return tuple(new or old for new, old in zip(changed, modifiers, strict=True))


def regroup(modifiers: Modifiers, size: int) -> Modifiers:
    """Give every weight whose groups are free groups of this size; if there is none, refuse."""
    check_whole_number("group_size", size, least=1)
    changed = [modifier.regrouped(size) for modifier in modifiers]
    if not any(changed):
        raise _no_free_groups(size, _weights(modifiers))
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
    except ConfigurationError as error:
        raise RecipeError.of(error, Option(key)) from None


def _no_free_groups(size: int, weights: list[str]) -> RecipeError:
    found = f"its weights are {listing(weights)}" if weights else "it quantizes no weights"
    return RecipeError(
        f"has no meaning here: {found}",
        subject=Option("group_size", size),
        hint="Groups whose size can be chosen are those of strategy 'group', as in W4A16; those "
        "of NVFP4 and MX are fixed by the format. Leave it out, or choose another scheme",
    )


def _weights(modifiers: Iterable[Modifier]) -> list[str]:
    """Say how the weights of a recipe are cut, each way once."""
    return list(dict.fromkeys(way for modifier in modifiers for way in modifier.weight_formats()))
