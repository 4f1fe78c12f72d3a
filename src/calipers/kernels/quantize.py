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


class Job(NamedTuple):
    """What is quantized, by what, and how its error counts."""

    pieces: Tensor
    scale: Tensor
    zero_point: Tensor | None
    fmt: Format
    norm: float


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
    if args.symmetric:
        zero_point = None
    job = Job(pieces, scale, zero_point, Format.of(args), norm)
    kernels = native_for(pieces) if norm <= HIGHEST_NATIVE_NORM else None
    return _natively(kernels, job) if kernels else _in_torch(job)


def _natively(kernels: ModuleType, job: Job) -> tuple[Tensor, Tensor]:
    pieces, scale, zero_point, fmt, norm = job
    grid, shape = as_grid(pieces, ordered=True), pieces.shape[1:-2]
    observations, rows, columns = pieces.shape[0], *pieces.shape[-2:]
    count = shape.numel()
    by_piece = pieces.new_empty(count, observations, rows, columns)
    errors = pieces.new_empty(kernels.quantize_chunks(grid), count, dtype=torch.float64)
    kernels.quantize(
        grid,
        scale.detach().float().reshape(count).contiguous(),
        None if zero_point is None else zero_point.float().reshape(count).contiguous(),
        grid_name(fmt),
        *fmt.limits,
        norm,
        by_piece,
        errors,
        torch.get_num_threads(),
    )
    values = by_piece.movedim(1, 0).reshape(pieces.shape)
    return values, errors.sum(0).reshape(shape)


def _in_torch(job: Job) -> tuple[Tensor, Tensor]:
    pieces, scale, zero_point, fmt, norm = job
    working = torch.promote_types(pieces.dtype, torch.float32)
    finite = torch.isfinite(pieces)
    x = pieces.to(working).masked_fill(~finite, 0)
    scale = scale.to(working)[..., None, None]
    zero_point = None if zero_point is None else zero_point.to(working)[..., None, None]
    values = quantize_dequantize(x, scale, zero_point, fmt)
    error = (values - x).abs_().double().pow_(norm).sum((0, -2, -1))
    return torch.where(finite, values.to(pieces.dtype), pieces), error
