"""How values are distributed, on a logarithmic axis; which of them a range cuts off or loses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.counts import count_values
from calipers.numerics.formats import Format
from calipers.numerics.qparams import quantize_dequantize
from calipers.statistics.value_counts import Distribution

BINS_PER_OCTAVE = 4
_MOST_OCTAVES = 24


class LogHistogram(NamedTuple):
    """How many values have which magnitude.

    Bin i holds 2^((first+i)/4) ≤ |x| < 2^((first+i+1)/4); the first one all smaller magnitudes but
    zero, too.

    :param first: the number of the first bin
    :param counts: of each bin
    :param zeros: how many values are zero
    """

    first: int
    counts: tuple[int, ...]
    zeros: int

    @property
    def total(self) -> int:
        """How many values there are."""
        return sum(self.counts) + self.zeros

    @classmethod
    def of(cls, seen: Distribution) -> LogHistogram:
        """Count values that are known with their counts.

        >>> LogHistogram.of(Distribution(torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([3, 5, 1])))
        LogHistogram(first=0, counts=(3, 0, 0, 0, 1), zeros=5)
        """
        filled = seen.values != 0
        magnitudes, counts = seen.values[filled].double().abs(), seen.counts[filled]
        zeros = int(seen.counts[~filled].sum())
        if not len(magnitudes):
            return cls(0, (), zeros)
        bins = (magnitudes.log2() * BINS_PER_OCTAVE).floor().long()
        last = int(bins.max())
        first = max(int(bins.min()), last - _MOST_OCTAVES * BINS_PER_OCTAVE)
        places = (bins - first).clamp(min=0)
        summed = torch.zeros(last - first + 1, dtype=torch.int64).index_add_(0, places, counts)
        return cls(first, tuple(summed.tolist()), zeros)


def distribution_of(values: Tensor) -> Distribution:
    """Return the finite values of a tensor, rounded to bfloat16 if they are wider, and counts."""
    dtype = values.dtype if values.dtype == torch.float16 else torch.bfloat16
    table = count_values(values.reshape(1, 1, 1, -1))[0].cpu()
    bins = table.nonzero().squeeze(1)
    found = bins.to(torch.int32).to(torch.int16).view(dtype).float()
    finite = torch.isfinite(found)
    return Distribution(found[finite], table[bins[finite]])


class Shares(NamedTuple):
    """What a format under one scale makes of values.

    :param clipped: the share of values that are cut off: beyond its ends by more than half a step
    :param vanished: the share of values that are not zero and become zero
    :param error: √(Σ(q−x)² / Σx²)
    """

    clipped: float
    vanished: float
    error: float

    @classmethod
    def of(
        cls, seen: Distribution, args: QuantizationArgs, scale: Tensor, zero_point: Tensor
    ) -> Shares:
        """Work them out from the counts of all values."""
        fmt = Format.of(args)
        x, counts = seen.values.double(), seen.counts.double()
        scale, zero = scale.double().flatten()[0].cpu(), zero_point.double().flatten()[0].cpu()
        rounded = quantize_dequantize(x, scale, None if args.symmetric else zero, fmt)
        codes, steps = x / scale + zero, fmt.values().double().diff()
        low, high = fmt.limits
        beyond = (codes > high + steps[-1] / 2) | (codes < low - steps[0] / 2)
        vanished = (rounded == 0) & (x != 0)
        total, energy = float(counts.sum()), float((x.square() * counts).sum())
        lost = float(((rounded - x).square() * counts).sum())
        return cls(
            float(counts[beyond].sum()) / total if total else 0.0,
            float(counts[vanished].sum()) / total if total else 0.0,
            (lost / energy) ** 0.5 if energy else 0.0,
        )
