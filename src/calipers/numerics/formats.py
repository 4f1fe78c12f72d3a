"""Number formats: which values a code can stand for, and which scales can be stored under it.

A format is a row of ``GRIDS``. What it means to round to its numbers, which they are and where they
end is read from the row; the native kernels have a row of the same name (``native/cpp/jobs.h``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)
from torch import Tensor

from calipers.errors import unsupported_format

FP8_DTYPE = torch.float8_e4m3fn
MX_GROUP_SIZE = 32


class ScaleKind(Enum):
    """What a scale may be."""

    FLOAT = "any value of the tensor's dtype, or of scale_dtype"
    E4M3_GLOBAL = "an fp8 e4m3 value, under one fp32 global scale per tensor (NVFP4)"
    POWER_OF_TWO = "a power of two, stored as its exponent (MX)"


@dataclass(frozen=True)
class Integers:
    """The whole numbers of so many bits, in two's complement.

    >>> Integers(3).values().tolist()
    [-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0]
    """

    bits: int

    kind: ClassVar[str] = "int"
    has_zero_points: ClassVar[bool] = True
    is_uniform: ClassVar[bool] = True
    """Whether all steps are alike, so that a zero point moves the codes, not the values."""
    takes_powers_of_two: ClassVar[bool] = False
    """Whether there are MX scales for it."""
    native_name: ClassVar[str] = "int"

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest number."""
        return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1

    def values(self) -> Tensor:
        """Every number in ascending order."""
        low, high = self.limits
        return torch.arange(low, high + 1, dtype=torch.float32, device="cpu")

    def round_(self, x: Tensor) -> Tensor:
        """Round to the nearest numbers, in place, ties to the even one."""
        return x.round_()


@dataclass(frozen=True)
class Floats:
    """Floats of a sign, so many bits of exponent and so many of mantissa.

    ``smallest_exponent`` is that of the smallest normal number, below which steps no longer shrink;
    ``largest`` is the last number before those codes that stand for NaN or infinity, if any do.
    ``dtype`` is a type of torch that has exactly these numbers: then torch rounds to it.

    >>> Floats(2, 1, 0, 6.0).values().tolist()[7:]
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """

    exponent_bits: int
    mantissa_bits: int
    smallest_exponent: int
    largest: float
    dtype: torch.dtype | None = None
    has_zero_points: bool = False

    kind: ClassVar[str] = "float"
    is_uniform: ClassVar[bool] = False
    takes_powers_of_two: ClassVar[bool] = True

    @property
    def bits(self) -> int:
        """How many a code has."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def native_name(self) -> str:
        """What the native kernels call it: its bits of exponent and mantissa."""
        return f"e{self.exponent_bits}m{self.mantissa_bits}"

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest number."""
        return -self.largest, self.largest

    def values(self) -> Tensor:
        """Every number in ascending order, without the second zero."""
        beyond = math.frexp(self.largest)[1]
        exponents = torch.arange(self.smallest_exponent, beyond, dtype=torch.float32, device="cpu")
        mantissas = torch.arange(2**self.mantissa_bits, dtype=torch.float32, device="cpu")
        steps = exponents.sub(self.mantissa_bits).exp2()
        normal = (mantissas + 2**self.mantissa_bits) * steps[:, None]
        positive = torch.cat([mantissas * steps[0], normal.flatten()])
        positive = positive[positive <= self.largest]
        return torch.cat([-positive[1:].flip(0), positive])

    def round_(self, x: Tensor) -> Tensor:
        """Round values within the limits to the nearest numbers, in place, ties to the even code.

        >>> Floats(2, 3, 0, 7.5).round_(torch.tensor([0.07, 2.1, 2.125, 4.3]))
        tensor([0.1250, 2.0000, 2.0000, 4.5000])
        """
        if self.dtype is not None:
            return x.copy_(x.to(self.dtype))
        # Without its sign and mantissa a float is the power of two below it.
        integers, exponent = _exponent_bits(x.dtype)
        below = x.view(integers).bitwise_and(exponent).view(x.dtype)
        step = below.clamp_(min=2.0**self.smallest_exponent).mul_(2.0**-self.mantissa_bits)
        return x.div_(step).round_().mul_(step)


Grid = Integers | Floats
"""The numbers that the codes of a format stand for."""

GRIDS: dict[tuple[str, int], Grid] = {
    **{("int", bits): Integers(bits) for bits in range(2, 9)},
    ("float", 8): Floats(4, 3, -6, 448.0, dtype=FP8_DTYPE, has_zero_points=True),
    ("float", 4): Floats(2, 1, 0, 6.0),
}
"""What compressed-tensors can store, by the ``type`` and ``num_bits`` of quantization arguments."""


@dataclass(frozen=True)
class Format:
    """The numbers that one code can represent, and how its scale is stored.

    >>> Format.of(QuantizationArgs(num_bits=4)).values().tolist()[:3]
    [-8.0, -7.0, -6.0]
    """

    grid: Grid
    symmetric: bool = True
    scale: ScaleKind = ScaleKind.FLOAT

    @classmethod
    def of(cls, args: QuantizationArgs) -> Format:
        """Read the format from quantization arguments; refuse one that does not exist."""
        kind = QuantizationType(args.type).value
        grid = GRIDS.get((kind, args.num_bits))
        if grid is None:
            raise unsupported_format(f"{kind} with {args.num_bits} bits")
        if not (args.symmetric or grid.has_zero_points):
            raise unsupported_format(f"Asymmetric fp{args.num_bits}")
        if args.scale_dtype == FP8_DTYPE and args.strategy == QuantizationStrategy.TENSOR_GROUP:
            return cls(grid, args.symmetric, ScaleKind.E4M3_GLOBAL)
        if args.scale_dtype != torch.uint8:
            return cls(grid, args.symmetric, ScaleKind.FLOAT)
        grouped = args.strategy == QuantizationStrategy.GROUP and args.group_size == MX_GROUP_SIZE
        if grid.takes_powers_of_two and args.symmetric and grouped:
            return cls(grid, args.symmetric, ScaleKind.POWER_OF_TWO)
        raise unsupported_format(
            f"{kind} with {args.num_bits} bits, group_size {args.group_size} and uint8 scales "
            f"(MX scales: symmetric float, strategy group, group_size {MX_GROUP_SIZE})"
        )

    @property
    def name(self) -> str:
        """What users are told, such as ``int4`` or ``float8``."""
        return f"{self.grid.kind}{self.bits}"

    @property
    def bits(self) -> int:
        """How many a code has."""
        return self.grid.bits

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest value of the grid."""
        return self.grid.limits

    @property
    def largest_exponent(self) -> int:
        """The exponent of the highest value, which MX scales bring others to."""
        return math.frexp(self.limits[1])[1] - 1

    @property
    def takes_signed_scales(self) -> bool:
        """Whether a negative scale gives other values: the lowest code has no counterpart."""
        low, high = self.limits
        return self.symmetric and low != -high

    def values(self) -> Tensor:
        """Every value of the grid in ascending order, without the second zero of floats."""
        return self.grid.values()

    def round_(self, x: Tensor) -> Tensor:
        """Round values within the limits to the grid, in place, ties to the even code."""
        return self.grid.round_(x)


@cache
def _exponent_bits(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """Return the integers of the same size, and the bits of an exponent: those of infinity."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return integers, int(torch.tensor(torch.inf, dtype=dtype, device="cpu").view(integers))


# Scales that can be stored, and the codes under them


class Window(NamedTuple):
    """The codes that there are, from ``lowest`` to ``highest``, and the zero point of floats.

    An integer zero point moves the window instead: codes are counted from it. ``above`` times the
    largest value, or ``below`` times the negative of the smallest, whichever is more, is the scale
    from which on half of it is no worse: all codes are so small that they can be doubled.
    """

    zero: float
    lowest: float
    highest: float
    above: float
    below: float


@cache
def windows_of(fmt: Format, signed: bool = False) -> tuple[Window, ...]:
    """Return the windows of a format: one, or one per zero point, in the order of zero points.

    ``signed`` adds the window of negative scales, which is the mirror image.

    >>> [window[1:3] for window in windows_of(Format(Integers(4)), signed=True)]
    [(-8.0, 7.0), (-7.0, 8.0)]
    """
    low, high = fmt.limits
    if fmt.symmetric:
        mirrored = [_window(fmt, -high, -low)] if signed else []
        return (_window(fmt, low, high), *mirrored)
    zero_points = fmt.values().tolist()
    if fmt.grid.is_uniform:
        return tuple(_window(fmt, low - zero, high - zero) for zero in zero_points)
    return tuple(_shifted_window(fmt, zero) for zero in zero_points)


def magnitudes_of(fmt: Format) -> Tensor:
    """Return every number of the grid without its sign, ascending from zero."""
    if fmt.grid.is_uniform:
        widest = -fmt.limits[0] if fmt.symmetric else fmt.limits[1] - fmt.limits[0]
        return torch.arange(widest + 1, dtype=torch.float32, device="cpu")
    return fmt.values()[fmt.values() >= 0]


def _window(fmt: Format, lowest: float, highest: float) -> Window:
    """Return the window without a zero point of floats."""
    grid = magnitudes_of(fmt)
    reaches = []
    for end in (highest, lowest):
        # The largest magnitude that is rounded to a code whose double is within the end. A side
        # that has no codes but zero asks for nothing.
        inside = len(grid[grid <= abs(end) / 2])
        reaches.append(2 / float(grid[inside - 1] + grid[inside]) if end else 0.0)
    return Window(0.0, lowest, highest, *reaches)


def _shifted_window(fmt: Format, zero: float) -> Window:
    """Return the window of floats x/s + zero.

    Doubling codes means doubling the zero point, while both fit. Whether or not they do, a scale
    at which no value comes to half a step of the grid at the zero point is a scale of zeros.
    """
    low, high = fmt.limits
    grid = fmt.values()
    at = int((grid == zero).nonzero())
    steps = grid.diff()[max(at - 1, 0) : at + 1]
    reach = 2 / float(steps.min())
    if abs(zero) < high / 2:
        reach = min(reach, 1 / (high / 2 - abs(zero)))
    return Window(zero, low, high, reach, reach)


def storable_scales(
    fmt: Format,
    dtype: torch.dtype,
    global_scale: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Return all positive scales, ascending, in float32; ``None`` where any float can be stored.

    A plain scale is stored in ``dtype``, that of the weight; what was asked for as ``scale_dtype``
    it is rounded to before. Under a global scale the scales are what is left after dividing by it.

    >>> len(storable_scales(Format(Integers(4)), torch.bfloat16))
    32639
    """
    if fmt.scale is ScaleKind.POWER_OF_TWO:
        lowest = -24 if dtype == torch.float16 else -127
        highest = 15 if dtype == torch.float16 else 127
        exponents = torch.arange(lowest, highest + 1, dtype=torch.float64, device="cpu")
        return exponents.exp2().float()
    stored = stored_scales(fmt, dtype, scale_dtype)
    if stored is None or global_scale is None:
        return stored
    return stored / global_scale.detach().float().cpu()


def stored_scales(
    fmt: Format, dtype: torch.dtype, scale_dtype: torch.dtype | None = None
) -> Tensor | None:
    """Return the positive numbers that stand in a checkpoint for scales that are no exponents.

    >>> float(stored_scales(Format(Integers(4)), torch.bfloat16, torch.float16)[-1])
    65280.0
    """
    if fmt.scale is ScaleKind.E4M3_GLOBAL:
        return _positive(FP8_DTYPE)
    small = [kind for kind in (scale_dtype, dtype) if kind is not None and kind.itemsize <= 2]
    if not small:
        return None
    values = _positive(small[0])
    return values[values.to(small[-1]).float() == values]


def fine_scales(around: float) -> Tensor:
    """Return the floats of 11 significant bits from 2⁻³⁰ to 4 times a magnitude."""
    mantissas = 1 + torch.arange(1024, dtype=torch.float64) / 1024
    octaves = torch.arange(-30, 2, dtype=torch.float64) + math.floor(math.log2(around))
    scales = (mantissas * octaves.exp2()[:, None]).flatten().float()
    distinct: Tensor = torch.unique(scales[(scales > 0) & torch.isfinite(scales)])
    return distinct


@cache
def _positive(dtype: torch.dtype) -> Tensor:
    """Return all positive finite values of a small float type."""
    bits = torch.int8 if dtype.itemsize == 1 else torch.int16
    codes = torch.arange(1, torch.iinfo(bits).max + 1, dtype=torch.int32, device="cpu").to(bits)
    values = codes.view(dtype).float()
    return values[torch.isfinite(values)]


def halvable_from(storable: Tensor) -> float:
    """Return the scale from which on half of every storable scale can be stored too."""
    halves = storable / 2
    at = torch.searchsorted(storable, halves).clamp(max=len(storable) - 1)
    last_failing = int((storable[at] != halves).nonzero().max())
    if last_failing + 1 == len(storable):
        return torch.finfo(torch.float32).max
    return float(storable[last_failing + 1])
