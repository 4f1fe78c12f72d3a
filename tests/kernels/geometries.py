"""Pieces of every shape that memory can have, each with a float64 copy in plain order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from data import DTYPES
from engines import with_engines
from torch import Tensor


def _misaligned(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Begin one element behind what is aligned."""
    memory = torch.empty(values.numel() + 1, dtype=values.dtype)
    memory[1:] = values.flatten()
    return memory[1:].reshape(shape)


def _with_gaps(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Every second column of a wider tensor, whose others would show."""
    memory = torch.full((*shape[:-1], 2 * shape[-1]), 1e4, dtype=values.dtype)
    memory[..., ::2] = values.reshape(shape)
    return memory[..., ::2]


def _in_rows(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows with a margin."""
    memory = torch.full((*shape[:-1], shape[-1] + 3), -1e4, dtype=values.dtype)
    memory[..., : shape[-1]] = values.reshape(shape)
    return memory[..., : shape[-1]]


def _transposed(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The transpose of the whole."""
    order = list(range(len(shape)))[::-1]
    return values.reshape(shape).permute(order).contiguous().permute(order)


def _blocks(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Pieces whose rows are those of a matrix of blocks."""
    plain = values.reshape(shape)
    return plain.transpose(2, 3).contiguous().transpose(2, 3)


def _tokens(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Observations of pieces, in an order in which the pieces come first."""
    return values.reshape(shape).movedim(0, 2).contiguous().movedim(2, 0)


MEMORIES: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "contiguous": lambda values, shape: values.reshape(shape),
    "misaligned": _misaligned,
    "with_gaps": _with_gaps,
    "in_rows": _in_rows,
    "transposed": _transposed,
    "blocks": _blocks,
    "tokens": _tokens,
}

# (observations, grid rows, grid columns, rows, columns)
SHAPES = [
    (1, 1, 1, 1, 1),
    (1, 33, 5, 1, 1),
    (1, 5, 3, 1, 7),
    (1, 3, 7, 1, 41),
    (1, 9, 4, 1, 16),
    (1, 3, 6, 1, 128),
    (1, 2, 3, 5, 9),
    (1, 2, 2, 16, 24),
    (1, 3, 1, 1, 300),
    (1, 2, 1, 1, 5000),
    (1, 1, 1, 3, 50000),
    (6, 1, 4, 1, 16),
    (11, 3, 1, 1, 33),
    (700, 1, 3, 1, 100),
]


in_any_memory = with_engines("shape, memory, dtype", SHAPES, list(MEMORIES), DTYPES)
"""Every shape in every memory, with dtypes and engines taking turns."""


def pieces(memory: str, shape: tuple[int, ...], values: Tensor) -> Tensor:
    """Lay values out in memory as told."""
    laid_out = MEMORIES[memory](values, shape)
    assert laid_out.shape == shape
    return laid_out
