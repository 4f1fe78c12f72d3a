"""Quantized values and their errors, natively."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from calipers.kernels.native import BACKEND, library, numbers_of
from calipers.kernels.pieces import as_grid
from calipers.kernels.quantize import Quantization, quantize, sum_errors
from calipers.kernels.threads import num_threads


@quantize.register(BACKEND)
def _values_and_errors(asked: Quantization) -> tuple[Tensor, Tensor]:
    pieces = asked.pieces
    observations, *shape, rows, columns = pieces.shape
    by_piece = pieces.new_empty(math.prod(shape), observations, rows, columns)
    errors = _run(asked, by_piece)
    return by_piece.movedim(1, 0).reshape(pieces.shape), errors


@sum_errors.register(BACKEND)
def _errors(asked: Quantization) -> Tensor:
    return _run(asked)


def _run(asked: Quantization, output: Tensor | None = None) -> Tensor:
    """Return the errors; the quantized values go nowhere but into ``output``, if it is given."""
    kernels = library()
    grid, shape = as_grid(asked.pieces, ordered=True), asked.pieces.shape[1:-2]
    count, zero_point = shape.numel(), asked.zero_point
    errors = asked.pieces.new_empty(kernels.quantize_chunks(grid), count, dtype=torch.float64)
    kernels.quantize(
        values=grid,
        weights=None if asked.weights is None else as_grid(asked.weights, ordered=True),
        scales=asked.scale.detach().float().reshape(count).contiguous(),
        zero_points=None if zero_point is None else zero_point.float().reshape(count).contiguous(),
        working=str(asked.working).removeprefix("torch."),
        numbers=numbers_of(asked.fmt.grid),
        norm=asked.norm,
        output=output,
        errors=errors,
        threads=num_threads(),
    )
    return errors.sum(0).reshape(shape)
