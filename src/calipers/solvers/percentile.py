"""The range that leaves out no more than a share of all values, in whole numbers."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor


def percentile_range(
    values: Tensor, counts: Tensor, percentile: float, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Return the narrowest ends beyond which at most 100 − ``percentile`` percent of all lie.

    ``values`` ascend, ``counts`` say how often each occurred. A symmetric range ends at ±t, the
    share counting both sides; otherwise each side may leave out half of it. An end is always one of
    the values: nothing is interpolated. ``percentile`` is taken as the decimal number it is
    written as, and compared in whole numbers, so that no rounding decides.

    >>> values, counts = torch.tensor([-2.0, 0.0, 1.0, 7.0]), torch.tensor([2, 995, 2, 1])
    >>> percentile_range(values, counts, 99.9, symmetric=True)
    (tensor(-2.), tensor(2.))
    >>> percentile_range(values, counts, 99.8, symmetric=False)
    (tensor(-2.), tensor(1.))
    """
    share = (100 - Fraction(str(percentile))) / 100 * int(counts.sum())
    if symmetric:
        magnitudes, order = values.abs().sort()
        end = _upper_end(magnitudes, counts[order], share // 1)
        return -end, end
    most = share // 2
    low = -_upper_end(-values.flip(0), counts.flip(0), most)
    return low, _upper_end(values, counts, most)


def bfloat16_upper_edge(end: Tensor, slack: int = 0) -> Tensor:
    """Return the upper edge, in float32, of what is rounded to a bfloat16 value.

    :param slack: how many floats to go beyond the edge

    >>> bfloat16_upper_edge(torch.tensor([1.0, -1.0, 0.0])).tolist()
    [1.00390625, -0.998046875, 4.591774807899561e-41]
    """
    bits = (end.float() + 0.0).view(torch.int32)  # one zero, the positive one
    half = 0x8000 + slack
    return torch.where(bits < 0, bits - half, bits + half).view(torch.float32)


def _upper_end(ascending: Tensor, counts: Tensor, most: int) -> Tensor:
    """Return the least value beyond which at most ``most`` lie."""
    beyond = counts.sum() - counts.cumsum(0)
    return ascending[beyond <= most][0]
