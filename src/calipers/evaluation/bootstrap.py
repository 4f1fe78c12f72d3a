"""Confidence intervals by the paired bootstrap.

Samples are drawn again, with replacement, as many as there are. Every figure of every checkpoint is
worked out from the same draws: what two checkpoints have in common, because some text is hard for
both, does not blur their difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 0
_AT_ONCE = 1 << 22

Sums = Mapping[str, Tensor]
"""What a figure is made of, by name: totals over all samples, or over each draw of them."""


@dataclass(frozen=True)
class Estimate:
    """A figure, and the interval that holds it with a confidence of 95 %.

    >>> Estimate(0.3, low=-0.1, high=0.7).holds(0)  # it may as well be nothing
    True
    """

    value: float
    low: float
    high: float

    def holds(self, number: float) -> bool:
        """Whether a number lies in the interval."""
        return self.low <= number <= self.high

    def text(self, form: str) -> str:
        """Return the figure and, in brackets, its interval."""
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"

    def as_dict(self) -> dict[str, float | None]:
        """Return plain data; what is not finite, as bounds from a single sample, is None."""
        return {
            name: number if math.isfinite(number) else None for name, number in vars(self).items()
        }


@dataclass(frozen=True)
class Difference(Estimate):
    """A difference of two figures, and the noise of computing them.

    :param noise: how large a difference can be that comes from nothing but roundings

    >>> Difference(1.8, low=0.5, high=3.0, noise=2.4).beyond_noise
    False
    """

    noise: float

    @property
    def beyond_noise(self) -> bool:
        """Whether it would be there on other text of the kind, and with other roundings."""
        return not self.holds(0) and abs(self.value) > self.noise

    def as_dict(self) -> dict[str, float | None]:
        """Return plain data."""
        return {**super().as_dict(), "beyond_noise": self.beyond_noise}


class Bootstrap:
    """Sums over samples, and over samples drawn again.

    :param sums: name → (samples,) what each sample adds

    >>> hits = Bootstrap({"hits": torch.tensor([1.0, 3.0]), "tries": torch.tensor([4.0, 4.0])})
    >>> hits.estimate(lambda sums: sums["hits"] / sums["tries"])
    Estimate(value=0.5, low=0.25, high=0.75)
    """

    def __init__(self, sums: Sums) -> None:
        self._names = list(sums)
        self._each = torch.stack([each.double().cpu() for each in sums.values()], dim=1)

    def estimate(self, figure: Callable[[Sums], Tensor]) -> Estimate:
        """Return a figure of the sums; from a single sample it can be anything."""
        value = float(figure(self._named(self._each.sum(0))))
        if len(self._each) < 2:
            return Estimate(value, -math.inf, math.inf)
        tail = (1 - CONFIDENCE) / 2
        bounds = figure(self._named(self._draws)).quantile(
            torch.tensor([tail, 1 - tail], dtype=torch.float64)
        )
        return Estimate(value, *bounds.tolist())

    def _named(self, sums: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._names, sums.unbind(-1), strict=True))

    @cached_property
    def _draws(self) -> Tensor:
        """The sums over each draw, (resamples, names)."""
        generator = torch.Generator().manual_seed(SEED)
        samples = len(self._each)
        chunk = max(1, _AT_ONCE // samples)
        found = []
        for start in range(0, RESAMPLES, chunk):
            count = min(chunk, RESAMPLES - start)
            drawn = torch.randint(samples, (count, samples), generator=generator)
            times = torch.zeros(count, samples, dtype=torch.float64)
            times.scatter_add_(1, drawn, torch.ones_like(times))
            found.append(times @ self._each)
        return torch.cat(found)
