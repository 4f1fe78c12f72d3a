"""Pieces, (observations, *qparam_shape, rows, columns): what shares a scale."""

from __future__ import annotations

import math

from torch import Tensor


def as_grid(pieces: Tensor, *, ordered: bool = False) -> Tensor:
    """Bring pieces into five dimensions, of a grid with two, without a copy if possible.

    ``ordered`` keeps the order of the values within a piece, which most operations do not need.
    """
    pieces = pieces.detach()
    observations, *grid, rows, columns = pieces.shape
    last = grid[-1] if grid else 1
    five = pieces.reshape(observations, math.prod(grid[:-1]), last, rows, columns)
    if not ordered and rows > 1 and five.stride(-2) < five.stride(-1):
        return five.transpose(-1, -2)
    return five


def length_of(pieces: Tensor) -> int:
    """Return how many values a piece has."""
    return pieces.shape[0] * pieces.shape[-2:].numel()


def by_piece(pieces: Tensor) -> Tensor:
    """Bring pieces into the shape (pieces, values)."""
    return pieces.movedim(0, -3).flatten(-3).reshape(pieces.shape[1:-2].numel(), -1)
