"""The range whose quantized distribution tells most about the one it stands for."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.numerics.formats import Format
from calipers.numerics.qparams import safe_qparams

_CANDIDATES_AT_ONCE = 64


def entropy_range(
    values: Tensor, counts: Tensor, low: Tensor, high: Tensor, args: QuantizationArgs, bins: int
) -> tuple[Tensor, Tensor]:
    """Return the part of a range whose quantized distribution diverges least.

    The values are counted in ``bins`` equal bins from ``low`` to ``high``, a range with zero in it:
    P. Zeros are left out, since no candidate loses anything of them. Candidates are the range times
    i/bins, from the whole one down to as many bins as there are codes. Q is what is left of P after
    clipping and quantizing, with the ends of the candidate rounded to their dtype and its scale as
    stored: each bin gets the code of its centre, bins beyond the candidate the code at its end, and
    what a code holds is spread evenly over those of its bins that are not empty. So a wide
    candidate loses what is told apart within a code, a narrow one what is told apart beyond its
    ends.

    The least Σ p·log(p/q) wins, of equal ones the widest range. All sums are float64.
    """
    lossy = values != 0
    histogram = _histogram(values[lossy], counts[lossy], low, high, bins)
    codes = len(Format.of(args).values())
    parts = torch.arange(bins, codes - 1, -1, dtype=torch.float64) / bins
    found = [
        _divergences(histogram, low, high, some, args)
        for some in parts.chunk(-(-len(parts) // _CANDIDATES_AT_ONCE))
    ]
    best = parts[torch.cat(found).argmin()]
    return (low.double() * best).to(low.dtype), (high.double() * best).to(high.dtype)


def _histogram(values: Tensor, counts: Tensor, low: Tensor, high: Tensor, bins: int) -> Tensor:
    """Count in equal bins; values that rounding put beyond an end belong to the last bin there."""
    start, width = low.double(), high.double() - low.double()
    places = ((values.double() - start) / width * bins).floor().clamp(0, bins - 1)
    return torch.zeros(bins, dtype=torch.float64).index_add_(0, places.long(), counts.double())


def _divergences(
    histogram: Tensor, low: Tensor, high: Tensor, parts: Tensor, args: QuantizationArgs
) -> Tensor:
    """Return Σ p·log(p/q) for each of some parts of the range.

    Codes ascend with the bins, so that sums over the bins of a code are differences of sums from
    the left; and q is the same for all bins of a code.
    """
    lows, highs = low.double() * parts[:, None], high.double() * parts[:, None]
    width = (high.double() - low.double()) / len(histogram)
    centres = low.double() + (torch.arange(len(histogram), dtype=torch.float64) + 0.5) * width
    edges = _edges(centres, lows.to(low.dtype), highs.to(high.dtype), args)
    mass, filled = (_from_left(x)[edges].diff() for x in (histogram, (histogram > 0).double()))
    before = _from_left(torch.xlogy(histogram, histogram))[-1]
    after = torch.xlogy(mass, mass / filled.clamp(min=1)).cumsum(1)[:, -1]
    return (before - after) / histogram.sum().clamp(min=1)


def _edges(centres: Tensor, lows: Tensor, highs: Tensor, args: QuantizationArgs) -> Tensor:
    """Return the first bin of each code under each candidate, and the end of the last."""
    fmt = Format.of(args)
    scale, zero_point = (value.double() for value in safe_qparams(lows, highs, args))
    shifted = centres / scale + (0 if fmt.symmetric else zero_point)
    rounded = fmt.round_(shifted.clamp_(*fmt.limits))
    codes = torch.cat([fmt.values().double(), torch.tensor([torch.inf])])
    return torch.searchsorted(rounded, codes.expand(len(lows), -1).contiguous())


def _from_left(values: Tensor) -> Tensor:
    """Sum all values before each place; one after the other, however many threads there are."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])
