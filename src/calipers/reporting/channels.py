"""Which channels of an input are far larger than others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

OUTLIER = 8.0
"""A channel is an outlier if its largest magnitude is that many times the median of all."""

_MOST_SHOWN = 256
_MOST_NAMED = 12


@dataclass(frozen=True)
class Channel:
    """A channel, its extrema, and how many times the median of all it reaches."""

    index: int
    low: float
    high: float
    times: float


@dataclass(frozen=True)
class ChannelRanges:
    """The extrema of the channels of an input; of many, those of runs of equal length.

    :param count: how many channels there are
    :param width: how many of them share a pair of extrema
    :param median: the median of the largest magnitudes of channels
    :param outliers: how many channels are outliers
    :param worst: the largest outliers
    """

    count: int
    width: int
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    median: float
    outliers: int
    worst: tuple[Channel, ...]

    @classmethod
    def of(cls, lows: Tensor, highs: Tensor) -> ChannelRanges | None:
        """Find the outliers; None where extrema are missing or not finite.

        >>> found = ChannelRanges.of(-torch.ones(5), torch.tensor([1.0, 1.0, 20.0, 0.5, 1.0]))
        >>> found.outliers, found.worst
        (1, (Channel(index=2, low=-1.0, high=20.0, times=20.0),))
        """
        lows, highs = lows.flatten().float().cpu(), highs.flatten().float().cpu()
        largest = torch.maximum(lows.abs(), highs.abs())
        if not len(lows) or not bool(torch.isfinite(largest).all()):
            return None
        median = float(largest.median())
        times = largest / median if median else torch.zeros_like(largest)
        far = (times > OUTLIER).nonzero().squeeze(1)
        order = far[times[far].argsort(descending=True, stable=True)][:_MOST_NAMED]
        worst = tuple(
            Channel(int(i), float(lows[i]), float(highs[i]), float(times[i])) for i in order
        )
        width = -(-len(lows) // _MOST_SHOWN)
        return cls(
            len(lows),
            width,
            tuple(float(part.min()) for part in torch.split(lows, width)),
            tuple(float(part.max()) for part in torch.split(highs, width)),
            median,
            len(far),
            worst,
        )
