"""From a range to scale, zero point and global scale, and what quantization makes of a tensor.

The arithmetic is that of compressed-tensors, which loads and runs the result, for any format; and
ranges that it turns into NaN are repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from compressed_tensors.offload import update_offload_parameter
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationStatus,
    round_to_quantized_type_dtype,
)
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.quantization.utils import generate_gparam, round_to_power_2
from torch import Tensor

from calipers.errors import TensorValueError
from calipers.numerics.formats import FP8_DTYPE, Format, ScaleKind

__all__ = [
    "ActivationQuantizer",
    "fake_quantize",
    "global_scale_of",
    "qparams_of",
    "quantize_dequantize",
    "safe_qparams",
]

_SMALLEST_FLOAT16 = 2.0**-24
_MX_BIAS = 127  # of stored exponents


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
        raise TensorValueError(
            f"{int((~sound).sum())} of {sound.numel()} ranges have no finite, positive scale",
            where=where,
            hint="Their min or max is NaN, Inf, or beyond what the dtype of the scale can hold",
        )
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
    fmt, dtype = Format.of(args), min_vals.dtype
    if fmt.scale is ScaleKind.POWER_OF_TWO:
        return _powers_of_two(min_vals, max_vals, fmt, args)
    stored = args.scale_dtype
    is_float = stored is not None and stored.is_floating_point
    if is_float and torch.finfo(stored).max > torch.finfo(dtype).max:  # where the library fails
        min_vals, max_vals = min_vals.float(), max_vals.float()
    if args.symmetric:
        low, high = _ends(fmt, min_vals.device)
        half = (high - low).to(min_vals.dtype) / 2
        scale = _stored(_absmax(min_vals, max_vals) / half, args, global_scale)
        return scale, _stored_zero_point(torch.zeros_like(scale, dtype=min_vals.dtype), args)
    scale, zero_point = _asymmetric(min_vals, max_vals, fmt, args, global_scale)
    # max − min may be too wide for its own dtype; its scale is not.
    wide_scale, wide_zero = _asymmetric(
        _widened(min_vals), _widened(max_vals), fmt, args, global_scale
    )
    fits = torch.isfinite(scale)
    zero_point = _choose(fits, zero_point, wide_zero)
    # An empty range has zero point 0/0; any would do.
    lowest, highest = fmt.limits
    empty = (min_vals >= 0) & (max_vals.clamp(min=0) / (highest - lowest) == 0)
    zero_point = _choose(empty.reshape(scale.shape), torch.zeros_like(zero_point), zero_point)
    return torch.where(fits, scale, wide_scale.to(scale.dtype)), zero_point


def global_scale_of(absmax: Tensor, where: str = "global_scale_of") -> Tensor:
    """Return the global scale under which local e4m3 scales use their whole range.

    It is float32: values of float64 may be so large that there is none, which is refused.

    >>> global_scale_of(torch.tensor(6.0))
    tensor([448.])
    """
    absmax = absmax.reshape(1)
    scale: Tensor = generate_gparam(-absmax, absmax)
    # In float16 the quotient of a small absmax overflows, and compressed-tensors answers 1; that of
    # one in float64 overflows when it is stored.
    wide: Tensor = generate_gparam(-absmax.float(), absmax.float())
    fits = (wide <= torch.finfo(absmax.dtype).max) & torch.isfinite(scale)
    found = torch.where(fits, scale, wide)
    if not bool(found > 0):
        raise TensorValueError(
            f"values up to {float(absmax):g} have no positive float32 global scale",
            where=where,
            hint="Scale the tensor down, or use a scheme without a global scale",
        )
    return found


def store_qparams(module: torch.nn.Module, base_name: str, qparams: Mapping[str, object]) -> None:
    """Copy parameters into those that the module has: no scale if it is found as the model runs."""
    for suffix, value in qparams.items():
        parameter = getattr(module, f"{base_name}_{suffix}", None)
        if value is not None and parameter is not None:
            assert isinstance(value, Tensor)
            value = value.reshape(parameter.shape)
            update_offload_parameter(module, f"{base_name}_{suffix}", value)


class ActivationQuantizer(NamedTuple):
    """Quantizes an activation as the frozen model does.

    :param base_name: ``input``, ``output``, ``q``, ``k`` or ``v``
    :param qparams: of static activations; what is dynamic follows from each value

    >>> args = QuantizationArgs(num_bits=8, dynamic=True, strategy="token")
    >>> ActivationQuantizer("input", args)(torch.tensor([[127.5, 0.6], [1.0, 0.0]]))
    tensor([[127.,   1.],
            [  1.,   0.]])
    """

    base_name: str
    args: QuantizationArgs
    qparams: Mapping[str, object] = {}

    def __call__(self, x: Tensor) -> Tensor:
        """Return what is left of a value; gradients pass as if it were the value itself."""
        # The library reads parameters from a module; this one holds nothing else.
        held = {
            f"{self.base_name}_{key}": value.to(x.device) if isinstance(value, Tensor) else None
            for key, value in self.qparams.items()
        }
        holder = SimpleNamespace(quantization_status=QuantizationStatus.FROZEN, **held)
        quantized: Tensor = forward_quantize(holder, x.detach(), self.base_name, self.args)
        if not (x.requires_grad and torch.is_grad_enabled()):
            return quantized
        return quantized + (x - x.detach())  # a zero with the gradient of x


def straight_through(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a function such as rounding whose gradient counts as that of doing nothing.

    >>> x = torch.tensor([1.4], requires_grad=True)
    >>> straight_through(x, torch.round), torch.autograd.grad(straight_through(x, torch.round), x)
    (tensor([1.], grad_fn=<_StraightThroughBackward>), (tensor([1.]),))
    """
    passed: Tensor = _StraightThrough.apply(x, function)  # type: ignore[no-untyped-call]
    return passed


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def quantize_dequantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, fmt: Format) -> Tensor:
    """Return what is left of ``x`` after rounding to the grid.

    ``scale`` and ``zero_point`` broadcast with ``x`` and have its dtype. Bit-equal to
    ``fake_quantize`` without a global scale, and without its temporaries.
    """
    codes = x / scale
    if zero_point is not None:
        codes += zero_point
    fmt.round_(codes.clamp_(*fmt.limits))
    if zero_point is not None:
        codes -= zero_point
    return codes.mul_(scale)


def _choose(condition: Tensor, this: Tensor, other: Tensor) -> Tensor:
    """``torch.where``, also for float8, which has it only for its bytes."""
    if this.dtype.itemsize > 1:
        return torch.where(condition, this, other)
    return torch.where(condition, this.view(torch.int8), other.view(torch.int8)).view(this.dtype)


# The arithmetic of compressed-tensors


def _asymmetric(
    min_vals: Tensor,
    max_vals: Tensor,
    fmt: Format,
    args: QuantizationArgs,
    global_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    low, high = _ends(fmt, min_vals.device)
    min_vals, max_vals = min_vals.clamp(max=0), max_vals.clamp(min=0)
    scale = (max_vals - min_vals) / (high - low).to(min_vals.dtype)
    zero_point = (low - min_vals / scale).clamp(low, high)
    return _stored(scale, args, global_scale), _stored_zero_point(zero_point, args)


def _powers_of_two(
    min_vals: Tensor, max_vals: Tensor, fmt: Format, args: QuantizationArgs
) -> tuple[Tensor, Tensor]:
    """Return MX scales; at the ends of a dtype the library's exponents over- and underflow."""
    absmax = _absmax(_widened(min_vals), _widened(max_vals))
    exponents = round_to_power_2(absmax).log2().floor() + (_MX_BIAS - fmt.largest_exponent)
    stored = round_to_quantized_type_dtype(exponents, torch.uint8)
    scale = (stored.float() - _MX_BIAS).exp2().reshape(stored.shape or (1,))
    if min_vals.dtype == torch.float16:
        empty = (min_vals >= 0) & (max_vals <= 0)
        scale = scale.clamp(min=_SMALLEST_FLOAT16).masked_fill_(empty, 1)
    return scale.to(min_vals.dtype), _stored_zero_point(torch.zeros_like(scale), args)


def _absmax(min_vals: Tensor, max_vals: Tensor) -> Tensor:
    """Return the largest magnitude of each range, into which zero is taken."""
    return torch.maximum(min_vals.clamp(max=0).abs(), max_vals.clamp(min=0))


@cache
def _ends(fmt: Format, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the limits of a format as tensors: devices divide by plain numbers less exactly."""
    low, high = (torch.tensor(end, device=device) for end in fmt.limits)
    return low, high


def _stored(scale: Tensor, args: QuantizationArgs, global_scale: Tensor | None) -> Tensor:
    """Return scales as they are stored; one of zero becomes a small one."""
    if global_scale is not None:
        scale = global_scale * scale
    stored = args.scale_dtype or scale.dtype
    if args.scale_dtype is not None:
        scale = round_to_quantized_type_dtype(scale, stored)
    if stored == FP8_DTYPE:
        least = 0.125
    else:
        least = torch.finfo(stored).eps if stored.is_floating_point else 1.0
    return scale.masked_fill(scale == 0, least).reshape(scale.shape or (1,))


def _stored_zero_point(zero_point: Tensor, args: QuantizationArgs) -> Tensor:
    rounded: Tensor = round_to_quantized_type_dtype(
        zero_point, args.zp_dtype, cast_to_original_dtype=False
    )
    return rounded.reshape(rounded.shape or (1,))


def _widened(value: Tensor) -> Tensor:
    return value.to(torch.float32 if value.dtype == torch.float16 else torch.float64)
