"""Solvers that go by the distribution of all values that were seen: percentile and entropy."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.numerics.formats import Format
from calipers.numerics.qparams import safe_qparams
from calipers.solvers.scales import CountedValues
from calipers.statistics.value_counts import Distribution

_CANDIDATES_AT_ONCE = 64  # parts of a range whose divergences are worked out together


def percentile_range(seen: CountedValues, percentile: float) -> tuple[Tensor, Tensor]:
    """Return the narrowest range that leaves out at most 100 − ``percentile`` percent of a piece.

    A symmetric range ends at ±t, the share counting both sides; otherwise each side may leave out
    half of it. An end is always one of the values, or the outer edge of its bin where values were
    rounded to be counted: nothing is interpolated. ``percentile`` is taken as the decimal number it
    is written as, and compared in whole numbers, so that no rounding decides.
    """
    left_out = (100 - Fraction(str(percentile))) / 100

    def ends_of(counted: Distribution, least: Tensor, _largest: Tensor) -> tuple[Tensor, Tensor]:
        values, counts = counted
        share = left_out * int(counts.sum())
        if seen.args.symmetric:
            magnitudes, order = values.abs().sort()
            high = _upper_end(magnitudes, counts[order], share // 1)
            low = -high
        else:
            most = share // 2
            low = -_upper_end(-values.flip(0), counts.flip(0), most)
            high = _upper_end(values, counts, most)
        if least.dtype.itemsize == 2:
            return low, high
        # float64 is rounded to float32 on its way, up to half a float32 further.
        slack = int(least.dtype == torch.float64)
        return -bfloat16_upper_edge(-low, slack), bfloat16_upper_edge(high, slack)

    return _piece_by_piece(seen, ends_of)


def entropy_range(seen: CountedValues, bins: int) -> tuple[Tensor, Tensor]:
    """Return the part of the whole range whose quantized distribution diverges least.

    The whole range of a piece is [−absmax, absmax] for symmetric formats, and from minimum to
    maximum, and to zero, for others. The values are counted in ``bins`` equal bins of it: P. Zeros
    are left out, since no candidate loses anything of them. Candidates are the range times i/bins,
    from the whole one down to as many bins as there are codes. Q is what is left of P after
    clipping and quantizing, with the ends of the candidate rounded to their dtype and its scale as
    stored: each bin gets the code of its centre, bins beyond the candidate the code at its end, and
    what a code holds is spread evenly over those of its bins that are not empty. So a wide
    candidate loses what is told apart within a code, a narrow one what is told apart beyond its
    ends.

    The least Σ p·log(p/q) wins, of equal ones the widest range. All sums are float64.
    """
    codes = len(Format.of(seen.args).values())
    parts = torch.arange(bins, codes - 1, -1, dtype=torch.float64) / bins

    def ends_of(counted: Distribution, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        low, high = low.clamp(max=0), high.clamp(min=0)
        if seen.args.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        if low == high:
            return low, high
        values, counts = counted
        lossy = values != 0
        start, width = low.double(), high.double() - low.double()
        # Values that rounding put beyond an end belong to the last bin there.
        places = ((values[lossy].double() - start) / width * bins).floor().clamp(0, bins - 1)
        histogram = torch.zeros(bins, dtype=torch.float64)
        histogram.index_add_(0, places.long(), counts[lossy].double())
        chunks = parts.chunk(-(-len(parts) // _CANDIDATES_AT_ONCE))
        divergences = [_divergences(histogram, low, high, chunk, seen.args) for chunk in chunks]
        best = parts[torch.cat(divergences).argmin()]
        return (start * best).to(low.dtype), (high.double() * best).to(high.dtype)

    return _piece_by_piece(seen, ends_of)


def _piece_by_piece(
    seen: CountedValues, ends_of: Callable[[Distribution, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Let a function find the ends of each piece, and cut them to its extrema.

    A piece without any value keeps its extrema.
    """
    low, high = seen.low, seen.high
    extrema = zip(low.flatten().cpu(), high.flatten().cpu(), strict=True)
    ends = [
        ends_of(values, *both) if len(values.values) else both
        for values, both in zip(seen.distributions, extrema, strict=True)
    ]
    lows, highs = (
        torch.stack([end.to(low) for end in side]).reshape(low.shape)
        for side in zip(*ends, strict=True)
    )
    return torch.maximum(lows, low), torch.minimum(highs, high)


def _divergences(
    histogram: Tensor, low: Tensor, high: Tensor, parts: Tensor, args: QuantizationArgs
) -> Tensor:
    """Return Σ p·log(p/q) for each of some parts of the range.

    Codes ascend with the bins, so that sums over the bins of a code are differences of sums from
    the left; and q is the same for all bins of a code.
    """
    fmt = Format.of(args)
    lows, highs = low.double() * parts[:, None], high.double() * parts[:, None]
    width = (high.double() - low.double()) / len(histogram)
    centres = low.double() + (torch.arange(len(histogram), dtype=torch.float64) + 0.5) * width
    qparams = safe_qparams(lows.to(low.dtype), highs.to(high.dtype), args)
    scale, zero_point = (value.double() for value in qparams)
    shifted = centres / scale + (0 if fmt.symmetric else zero_point)
    rounded = fmt.round_(shifted.clamp_(*fmt.limits))
    codes = torch.cat([fmt.values().double(), torch.tensor([torch.inf])])
    # The first bin of each code under each candidate, and the end of the last.
    edges = torch.searchsorted(rounded, codes.expand(len(parts), -1).contiguous())
    mass, filled = (_from_left(x)[edges].diff() for x in (histogram, (histogram > 0).double()))
    before = _from_left(torch.xlogy(histogram, histogram))[-1]
    after = torch.xlogy(mass, mass / filled.clamp(min=1)).cumsum(1)[:, -1]
    return (before - after) / histogram.sum().clamp(min=1)


def _from_left(values: Tensor) -> Tensor:
    """Sum all values before each place; one after the other, however many threads there are."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


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
