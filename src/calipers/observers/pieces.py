"""What an observer is handed: the canonical view of a tensor, or its pieces as they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from calipers.errors import not_finite
from calipers.kernels.extrema import extrema
from calipers.statistics.observation import Observation

Update = TypeVar("Update", bound=Callable[..., None])


def in_pieces(update: Update) -> Update:
    """Mark an ``update_statistics_from_observed`` that asks only ``extrema`` and ``pieces``.

    It is handed the pieces themselves, and no canonical view is made, which may cost a copy.
    A subclass that overrides it gets the canonical view again, and may pass it on.
    """
    update.in_pieces = update  # type: ignore[attr-defined]
    return update


def _is_marked(update: Callable[..., None]) -> bool:
    """Whether an update is marked itself; a mark that ``functools.wraps`` copied does not count."""
    return getattr(update, "in_pieces", None) is update


class ObservedPieces:
    """What an observer is being shown, for its update to ask about."""

    _observation: Observation | None = None

    def label(self) -> str:
        """Return how messages call the observer."""
        return type(self).__name__

    def extrema(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value of each piece.

        Within ``update_statistics_from_observed`` they are already at hand.
        """
        if self._observation is not None and observed is self._observation.observed:
            found = self._observation.extrema
        else:
            found = extrema(observed.unsqueeze(-2))
            if found.nonfinite:
                raise not_finite(self.label(), found.nonfinite, observed.numel(), observed.shape)
        return found.min_vals, found.max_vals

    def pieces(self, observed: Tensor) -> Tensor:
        """Return what kernels take: the tensor being observed, or a canonical view, in pieces."""
        if self._observation is not None and observed is self._observation.observed:
            return self._observation.pieces
        return observed.unsqueeze(-2)

    def _takes_pieces(self) -> bool:
        """Whether the update is marked itself, and the methods it asks are our own."""
        own: Any = type(self)
        ours = own.extrema is ObservedPieces.extrema and own.pieces is ObservedPieces.pieces
        return ours and _is_marked(own.update_statistics_from_observed)
