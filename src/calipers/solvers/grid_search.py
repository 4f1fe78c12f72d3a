"""The best of some ranges, each a part of the whole one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from calipers.kernels.search import search_range
from calipers.solvers.minmax import of_range
from calipers.solvers.problem import Problem, Solution


class SearchedParts(NamedTuple):
    """Which parts of a range are tried.

    :param factors: what the range is multiplied by, one after the other
    :param expand: what it is multiplied by before
    :param patience: how many factors in a row in vain end the search; None: none do
    """

    factors: Sequence[float]
    expand: float = 1.0
    patience: int | None = None


def grid_search(
    problem: Problem, parts: SearchedParts, global_scale: Tensor | None = None
) -> Solution:
    """Take the range with the least Σ w·|q−x|^norm of each piece."""
    return of_range(problem, *best_range(problem, parts), global_scale)


def best_range(problem: Problem, parts: SearchedParts) -> tuple[Tensor, Tensor]:
    """Return the range with the least Σ w·|q−x|^norm of each piece, as it would be stored.

    Weights are those of a row of a weight, or None: a piece must be a run of columns of one row.
    """
    weights = problem.weights.diagonal
    return search_range(
        problem.pieces,
        problem.low,
        problem.high,
        problem.args,
        factors=parts.factors,
        norm=problem.norm,
        expand=parts.expand,
        patience=parts.patience,
        weights=None if weights is None else weights.reshape(-1, weights.shape[-1]),
    )
