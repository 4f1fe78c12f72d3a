"""What the best scale is, by trying them all in float64.

Shares nothing with Calipers: an error is the distance to the nearest number of an explicitly
written grid, and scales that can be stored are found by casting.
"""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from reference import grid_of
from torch import Tensor

FP8 = torch.float8_e4m3fn
_AT_ONCE = 1 << 21


def floats_of(dtype: torch.dtype) -> Tensor:
    """Every positive number of a small float type, in float64."""
    if dtype.itemsize == 1:
        every = torch.arange(127, dtype=torch.uint8).view(dtype)
    else:
        every = torch.arange(2**15 - 1, dtype=torch.int16).view(dtype)
    every = every.double()
    return every[torch.isfinite(every) & (every > 0)]


def around(scales: Tensor, x: Tensor, octaves: int = 14) -> Tensor:
    """Those from 2^-octaves to 8 times the largest magnitude."""
    largest = float(x.abs().max()) or 1.0
    return scales[(scales <= 8 * largest) & (scales >= largest * 2.0**-octaves)]


def zero_points(args: QuantizationArgs) -> list[float]:
    return [0.0] if args.symmetric else grid_of(args).tolist()


def errors(
    x: Tensor,
    scales: Tensor,
    args: QuantizationArgs,
    zero: float = 0.0,
    norm: float = 2.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Σ w·|q−x|^norm of values under each scale, which may be negative.

    A scale under which a value leaves its own dtype is none.
    """
    most = torch.finfo(x.dtype).max
    x = x.double().flatten()
    w = torch.ones_like(x) if weights is None else weights.double().flatten()
    grid = torch.from_numpy(grid_of(args))
    middles = (grid[1:] + grid[:-1]) / 2
    found = []
    for part in scales.double().split(max(1, _AT_ONCE // len(x))):
        codes = x / part[:, None] + zero
        if args.type == "int":
            codes = codes.round_().clamp_(grid[0], grid[-1])
        else:
            codes = grid[torch.bucketize(codes, middles)]
        values = codes.sub_(zero).mul_(part[:, None])
        overflows = (values.abs() > most).any(1)
        error = values.sub_(x).abs_()
        error = error.square_() if norm == 2 else error.pow_(norm)
        found.append(error.mul_(w).sum(1).masked_fill_(overflows, torch.inf))
    return torch.cat(found)


def all_errors(
    x: Tensor,
    scales: Tensor,
    args: QuantizationArgs,
    norm: float = 2.0,
    weights: Tensor | None = None,
    signed: bool = False,
) -> Tensor:
    """The same for each zero point, or each sign of the scale: (zero points, scales)."""
    rows = [errors(x, scales, args, zero, norm, weights) for zero in zero_points(args)]
    rows += [errors(x, -scales, args, 0.0, norm, weights)] if signed else []
    return torch.stack(rows)
