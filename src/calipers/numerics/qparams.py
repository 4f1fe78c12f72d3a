"""From a range to scale, zero point and global scale, and what quantization makes of a tensor.

The arithmetic is that of compressed-tensors, which loads and runs the result. It is called
through here, because it turns some ranges into NaN.
"""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from calipers.errors import NonFiniteRangeError
from calipers.numerics.formats import Format, ScaleKind

__all__ = ["fake_quantize", "global_scale_of", "qparams_of", "quantize_dequantize", "safe_qparams"]

_SMALLEST_FLOAT16 = 2.0**-24


def qparams_of(
    min_vals: Tensor,
    max_vals: Tensor,
    args: QuantizationArgs,
    global_scale: Tensor | None = None,
    where: str = "qparams_of",
) -> tuple[Tensor, Tensor]:
    """Return scale and zero point of each range; refuse a range that has none, saying ``where``.

    >>> args = QuantizationArgs(num_bits=8, symmetric=False)
    >>> scale, zero_point = qparams_of(torch.tensor([0.0]), torch.tensor([2.55]), args)
    >>> round(scale.item(), 6), zero_point.item()
    (0.01, -128)
    """
    scale, zero_point = safe_qparams(min_vals, max_vals, args, global_scale)
    sound = (torch.isfinite(min_vals) & torch.isfinite(max_vals)).reshape(scale.shape)
    sound &= torch.isfinite(scale) & (scale > 0)
    if not bool(sound.all()):
        raise NonFiniteRangeError(where, int((~sound).sum()), sound.numel())
    return scale, zero_point


def safe_qparams(
    min_vals: Tensor,
    max_vals: Tensor,
    args: QuantizationArgs,
    global_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return compressed-tensors' parameters, repaired where its arithmetic breaks down.

    Needs no answer from the device, so that a search can call it for every candidate.
    """
    dtype = min_vals.dtype
    if Format.of(args).scale is ScaleKind.POWER_OF_TWO:
        return _powers_of_two(min_vals, max_vals, args)
    if _has_wider_scales(args, dtype):
        min_vals, max_vals = min_vals.float(), max_vals.float()
    scale: Tensor
    zero_point: Tensor
    scale, zero_point = calculate_qparams(min_vals, max_vals, args, global_scale)
    if args.symmetric:
        return scale, zero_point
    # max − min may be too wide for its own dtype; its scale is not.
    wide_scale, wide_zero = calculate_qparams(
        _widened(min_vals), _widened(max_vals), args, global_scale
    )
    fits = torch.isfinite(scale)
    zero_point = _choose(fits, zero_point, wide_zero)
    # An empty range has zero point 0/0; any would do.
    low, high = Format.of(args).limits
    empty = (min_vals >= 0) & (max_vals.clamp(min=0) / (high - low) == 0)
    empty = empty.reshape(scale.shape)
    zero_point = _choose(empty, torch.zeros_like(zero_point), zero_point)
    return torch.where(fits, scale, wide_scale.to(scale.dtype)), zero_point


def global_scale_of(absmax: Tensor) -> Tensor:
    """Return the global scale under which local e4m3 scales use their whole range.

    >>> global_scale_of(torch.tensor(6.0))
    tensor([448.])
    """
    absmax = absmax.reshape(1)
    scale: Tensor = generate_gparam(-absmax, absmax)
    # In float16 the quotient of a small absmax overflows, and compressed-tensors answers 1.
    wide: Tensor = generate_gparam(-absmax.float(), absmax.float())
    fits = wide <= torch.finfo(absmax.dtype).max
    return torch.where(fits, scale, wide)


def quantize_dequantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> Tensor:
    """Return what is left of ``x`` after rounding to the grid.

    ``scale`` and ``zero_point`` broadcast with ``x`` and have its dtype. Bit-equal to
    ``fake_quantize`` without a global scale, and without its temporaries.
    """
    low, high = fmt.limits
    codes = x / scale
    if zero_point is not None:
        codes += zero_point
    fmt.round_(codes.clamp_(low, high))
    if zero_point is not None:
        codes -= zero_point
    return codes.mul_(scale)


def _choose(condition: Tensor, this: Tensor, other: Tensor) -> Tensor:
    """``torch.where``, also for float8, which has it only for its bytes."""
    if this.dtype.itemsize > 1:
        return torch.where(condition, this, other)
    return torch.where(condition, this.view(torch.int8), other.view(torch.int8)).view(this.dtype)


def _powers_of_two(
    min_vals: Tensor, max_vals: Tensor, args: QuantizationArgs
) -> tuple[Tensor, Tensor]:
    """Return MX scales; at the ends of a dtype the library's exponents over- and underflow."""
    scale, zero_point = calculate_qparams(_widened(min_vals), _widened(max_vals), args)
    if min_vals.dtype == torch.float16:
        empty = (min_vals >= 0) & (max_vals <= 0)
        scale = scale.clamp(min=_SMALLEST_FLOAT16).masked_fill_(empty, 1)
    return scale.to(min_vals.dtype), zero_point


def _widened(value: Tensor) -> Tensor:
    return value.to(torch.float32 if value.dtype == torch.float16 else torch.float64)


def _has_wider_scales(args: QuantizationArgs, dtype: torch.dtype) -> bool:
    """Whether scales are stored in a float type beyond ``dtype``, where the library fails."""
    stored = args.scale_dtype
    if stored is None or not stored.is_floating_point:
        return False
    return torch.finfo(stored).max > torch.finfo(dtype).max
