"""How values are distributed, on a logarithmic axis."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.reductions import count_values
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
