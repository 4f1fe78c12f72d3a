"""What quantization makes of each value, and the error of each piece."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.dispatch import HIGHEST_NATIVE_NORM, as_grid, grid_name, native_for
from calipers.numerics.formats import Format
from calipers.numerics.qparams import quantize_dequantize

_TILE = 1 << 22  # numbers worked on at once


class Job(NamedTuple):
    """What is quantized, by what, and how its error counts; weights have the shape of pieces."""

    pieces: Tensor
    scale: Tensor
    zero_point: Tensor | None
    fmt: Format
    norm: float
    weights: Tensor | None = None


@torch.no_grad()
def quantize_with_error(
    pieces: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    args: QuantizationArgs,
    norm: float = 2.0,
) -> tuple[Tensor, Tensor]:
    """Quantize and dequantize pieces, (observations, *qparam_shape, rows, columns).

    Returns the values in the shape and dtype of ``pieces``, and Σ|q−x|^norm of each piece in
    float64. ``scale`` and ``zero_point`` have the qparam shape; a global scale is already divided
    out. The work is done in float32 (float64 for float64). NaN and Inf stay and add no error.
    No gradient runs through this.

    >>> args = QuantizationArgs(num_bits=4)
    >>> x = torch.tensor([[[[1.0, 2.2, -3.5]]]])
    >>> quantize_with_error(x, torch.tensor([0.5]), None, args)
    (tensor([[[[ 1.0000, 2.0000, -3.5000]]]]), tensor([0.0400], dtype=torch.float64))
    """
    job = _job(pieces, scale, zero_point, args, norm)
    kernels = _kernels_for(job)
    if kernels is None:
        return _in_torch(job)
    observations, rows, columns = pieces.shape[0], *pieces.shape[-2:]
    by_piece = pieces.new_empty(pieces.shape[1:-2].numel(), observations, rows, columns)
    errors = _natively(kernels, job, by_piece)
    return by_piece.movedim(1, 0).reshape(pieces.shape), errors


@torch.no_grad()
def quantization_errors(
    pieces: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    args: QuantizationArgs,
    norm: float = 2.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Return Σ w·|q−x|^norm of each piece alone; ``weights`` broadcasts with the pieces.

    >>> args = QuantizationArgs(num_bits=4)
    >>> x = torch.tensor([[[[1.0, 2.2, -3.5]]]])
    >>> quantization_errors(x, torch.tensor([0.5]), None, args, weights=torch.tensor(2.0))
    tensor([0.0800], dtype=torch.float64)
    """
    job = _job(pieces, scale, zero_point, args, norm, weights)
    kernels = _kernels_for(job)
    return _errors_in_torch(job) if kernels is None else _natively(kernels, job)


def _job(
    pieces: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    args: QuantizationArgs,
    norm: float,
    weights: Tensor | None = None,
) -> Job:
    if weights is not None:
        weights = weights.to(pieces.device, torch.promote_types(pieces.dtype, torch.float32))
        weights = weights.expand(pieces.shape)
    return Job(
        pieces, scale, None if args.symmetric else zero_point, Format.of(args), norm, weights
    )


def _kernels_for(job: Job) -> ModuleType | None:
    return native_for(job.pieces) if job.norm <= HIGHEST_NATIVE_NORM else None


def _natively(kernels: ModuleType, job: Job, output: Tensor | None = None) -> Tensor:
    grid, shape = as_grid(job.pieces, ordered=True), job.pieces.shape[1:-2]
    count = shape.numel()
    errors = job.pieces.new_empty(kernels.quantize_chunks(grid), count, dtype=torch.float64)
    zero_point = job.zero_point
    kernels.quantize(
        grid,
        None if job.weights is None else as_grid(job.weights, ordered=True),
        job.scale.detach().float().reshape(count).contiguous(),
        None if zero_point is None else zero_point.float().reshape(count).contiguous(),
        grid_name(job.fmt),
        *job.fmt.limits,
        job.norm,
        output,
        errors,
        torch.get_num_threads(),
    )
    return errors.sum(0).reshape(shape)


def _in_torch(job: Job) -> tuple[Tensor, Tensor]:
    working = torch.promote_types(job.pieces.dtype, torch.float32)
    finite = torch.isfinite(job.pieces)
    x = job.pieces.to(working).masked_fill(~finite, 0)
    scale = job.scale.to(working)[..., None, None]
    zero_point = None if job.zero_point is None else job.zero_point.to(working)[..., None, None]
    values = quantize_dequantize(x, scale, zero_point, job.fmt)
    error = (values - x).abs_().double().pow_(job.norm)
    if job.weights is not None:
        error *= job.weights
    return torch.where(finite, values.to(job.pieces.dtype), job.pieces), error.sum((0, -2, -1))


def _errors_in_torch(job: Job) -> Tensor:
    """Work tile by tile: the values themselves are not kept."""
    shape = job.pieces.shape[1:-2]
    pieces, weights = (
        None if part is None else part.movedim(0, -3).reshape(shape.numel(), -1)
        for part in (job.pieces, job.weights)
    )
    assert pieces is not None
    scale = job.scale.reshape(-1)
    zero_point = None if job.zero_point is None else job.zero_point.reshape(-1)
    errors = torch.zeros(len(pieces), dtype=torch.float64, device=pieces.device)
    columns = min(pieces.shape[1], _TILE)
    step = max(1, _TILE // columns)
    for row in range(0, len(pieces), step):
        for column in range(0, pieces.shape[1], columns):
            these = slice(row, row + step), slice(column, column + columns)
            part = job._replace(
                pieces=pieces[these][None, :, None],
                scale=scale[these[0]],
                zero_point=None if zero_point is None else zero_point[these[0]],
                weights=None if weights is None else weights[these][None, :, None],
            )
            errors[these[0]] += _in_torch(part)[1]
    return errors.reshape(shape)
