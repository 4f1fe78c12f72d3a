"""A mark for updates that take the pieces of a tensor as they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Update = TypeVar("Update", bound=Callable[..., None])


def in_pieces(update: Update) -> Update:
    """Mark an ``update_statistics_from_observed`` that asks only ``extrema`` and ``pieces``.

    It is handed the pieces themselves, and no canonical view is made, which may cost a copy.
    A subclass that overrides it gets the canonical view again, and may pass it on.
    """
    update.in_pieces = update  # type: ignore[attr-defined]
    return update


def is_in_pieces(update: Callable[..., None]) -> bool:
    """Whether an update is marked itself; a mark that ``functools.wraps`` copied does not count."""
    return getattr(update, "in_pieces", None) is update
