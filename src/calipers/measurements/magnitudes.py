"""How large the values of a tensor are: from the count of every value that was seen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from calipers.statistics.base import Statistic
from calipers.statistics.value_counts import ValueCounts


@dataclass(frozen=True)
class Magnitudes:
    """How often magnitudes occurred, by powers of two.

    :param rms: √(Σx² / n) over all finite values
    :param largest: the largest magnitude
    :param zeros: how many values are zero
    :param exponent: of the first count: that of magnitudes from 2^exponent up to twice as much
    :param counts: one for each power of two, from the least that occurred to the largest
    """

    rms: float
    largest: float
    zeros: int
    exponent: int
    counts: tuple[int, ...]

    @property
    def peak(self) -> float:
        """How extreme the values are: max|x| ÷ rms; 0 where all are zero."""
        return self.largest / self.rms if self.rms else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"zeros": self.zeros, "exponent": self.exponent, "counts": list(self.counts)}


def magnitudes_of(statistics: Mapping[str, Statistic]) -> Magnitudes | None:
    """Return how large values were; None where they were not counted.

    >>> seen = ValueCounts()
    >>> seen.update(torch.tensor([[0.0, 1.0, -1.5, 4.0]]))
    >>> found = magnitudes_of({"counts": seen})
    >>> found.zeros, found.exponent, found.counts, found.largest
    (1, 0, (2, 0, 1), 4.0)
    """
    counted = [each for each in statistics.values() if isinstance(each, ValueCounts)]
    parts = list(counted[0].distributions()) if counted and counted[0].fields() else []
    if not parts:
        return None
    sizes = torch.cat([part.values for part in parts]).double().abs()
    counts = torch.cat([part.counts for part in parts])
    total = int(counts.sum())
    if not total:
        return None
    rms = math.sqrt(float((sizes.square() * counts).sum()) / total)
    zeros = int(counts[sizes == 0].sum())
    if zeros == total:
        return Magnitudes(0.0, 0.0, zeros, 0, ())
    sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    exponents = torch.frexp(sizes).exponent.long() - 1
    first = int(exponents.min())
    found = counts.new_zeros(int(exponents.max()) - first + 1).index_add_(
        0, exponents - first, counts
    )
    return Magnitudes(rms, float(sizes.max()), zeros, first, tuple(found.tolist()))
