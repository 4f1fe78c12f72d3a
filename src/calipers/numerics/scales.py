"""Which scales a checkpoint can store, and which codes there are under each."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.numerics.formats import FP8_DTYPE, Format, ScaleKind


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

    >>> from calipers.numerics.formats import Integers
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
    """Return every number of the grid without its sign, ascending from zero.

    >>> from calipers.numerics.formats import Integers
    >>> magnitudes_of(Format(Integers(3)))
    tensor([0., 1., 2., 3., 4.])
    """
    if fmt.grid.is_uniform:
        widest = -fmt.limits[0] if fmt.symmetric else fmt.limits[1] - fmt.limits[0]
        return torch.arange(widest + 1, dtype=torch.float32, device="cpu")
    return fmt.values()[fmt.values() >= 0]


@cache
def _halving_scale(fmt: Format, end: float) -> float:
    """Return the largest magnitude that is rounded to a code whose double is within ``end``."""
    grid = magnitudes_of(fmt)
    inside = grid[grid <= abs(end) / 2]
    return float(grid[len(inside) - 1] + grid[len(inside)]) / 2


def _window(fmt: Format, lowest: float, highest: float) -> Window:
    # Where a side has no codes but zero, it asks for nothing.
    above, below = (1 / _halving_scale(fmt, end) if end else 0.0 for end in (highest, lowest))
    return Window(0.0, lowest, highest, above, below)


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

    >>> from calipers.numerics.formats import Integers
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

    >>> from calipers.numerics.formats import Integers
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
    """Return the floats of 11 significant bits from 2⁻³⁰ to 4 times a magnitude.

    >>> fine_scales(1.0)[[0, -1]].log2().round()
    tensor([-30., 2.])
    """
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
    """Return the scale from which on half of every storable scale can be stored too.

    >>> halvable_from(torch.tensor([1.0, 3.0, 4.0, 6.0, 8.0]))
    6.0
    """
    halves = storable / 2
    at = torch.searchsorted(storable, halves).clamp(max=len(storable) - 1)
    last_failing = int((storable[at] != halves).nonzero().max())
    if last_failing + 1 == len(storable):
        return torch.finfo(torch.float32).max
    return float(storable[last_failing + 1])
