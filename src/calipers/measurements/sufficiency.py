"""Whether the data sufficed: how much of what solvers read would still move with more of it.

Two halves of the data were measured apart. What is found in both differs by chance; from by how
much follows how far what is found in all data is from what much more data would tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs

from calipers.errors import MeasurementsError, counted, not_allowed
from calipers.measurements.tensors import Halves, Statistics
from calipers.notebook import NotebookView
from calipers.solvers.scales import CountedValues, least_error
from calipers.statistics.ranges import Extrema
from calipers.statistics.sums import SquareSums
from calipers.statistics.value_counts import ValueCounts

TOLERANCE = 0.1
"""How much of a scale, or of importance, may still move."""
ENOUGH = 0.95
"""The share of tensors that must stay within the tolerance: single ones may move by chance."""
FIRST_STOP = 16
"""Samples after which it is first looked whether they suffice."""
SURE = 2
"""Standard errors within which nearly all results stay: so many must be within the tolerance."""
_PRIOR = 2
"""For how many more pairs of halves the typical movement of all tensors stands: one pair tells
little of one tensor."""
_MEDIAN_OF_NORMAL = 0.6745
"""The median of how far a normal variable is from its mean, in standard deviations."""
_FURTHEST = 64
"""Nobody knows what more than so many times the data would tell."""
_INT8 = QuantizationArgs(num_bits=8, symmetric=True)


@dataclass(frozen=True)
class TensorSufficiency:
    """How much of what is known of a tensor would still move.

    Movements are shares of the value itself; None where nothing can be said.

    :param readers: all names under which it is read
    :param half_tokens: how many tokens were seen in each half
    :param minmax: by how much the largest magnitude grows when the data doubles: the scale of
        ``static_minmax``
    :param mse: the standard error of the scale of least squared error for int8: ``histogram_mse``
    :param importance: the standard error of E[x²] of channels, of which share each has
    :param is_sufficient: whether twice the largest movement is within the tolerance, and both
        halves saw tokens
    """

    tensor: str
    readers: tuple[str, ...]
    tokens: int
    half_tokens: tuple[int, int]
    minmax: float | None
    mse: float | None
    importance: float | None
    is_sufficient: bool

    @property
    def movement(self) -> float:
        """The largest movement; infinite where a half saw nothing."""
        known = [each for each in (self.minmax, self.mse, self.importance) if each is not None]
        return max(known, default=math.inf) if all(self.half_tokens) else math.inf


@dataclass(frozen=True)
class Sufficiency(NotebookView):
    """Whether data sufficed for a model: each distinct tensor, in the order of the model."""

    tensors: tuple[TensorSufficiency, ...]
    samples: int
    tolerance: float

    @property
    def share(self) -> float:
        """The share of the tensors for which the data sufficed."""
        return sum(each.is_sufficient for each in self.tensors) / max(1, len(self.tensors))

    @property
    def is_sufficient(self) -> bool:
        """Whether it sufficed for nearly all of them, and every tensor was seen in both halves."""
        return self.share >= ENOUGH and not self.unseen

    @property
    def unseen(self) -> tuple[str, ...]:
        """The tensors that no token has reached in a half of the data, such as of idle experts."""
        return tuple(each.tensor for each in self.tensors if not all(each.half_tokens))

    @property
    def worst(self) -> tuple[TensorSufficiency, ...]:
        """The tensors for which it did not suffice, those that move most first."""
        lacking = [each for each in self.tensors if not each.is_sufficient]
        return tuple(sorted(lacking, key=lambda each: (-each.movement, each.tensor)))

    @property
    def needed_samples(self) -> int | None:
        """How many samples would suffice, as far as can be told; None where it cannot.

        Standard errors fall with the square root of the data. A maximum grows by the same step
        whenever the data doubles, as it does where tails fall exponentially: it is the share of
        that step that falls, and slowly.
        """
        if self.is_sufficient:
            return self.samples
        factors = sorted(self._factor(each) for each in self.tensors)
        factor = factors[max(0, math.ceil(ENOUGH * len(factors)) - 1)] if factors else math.inf
        if self.unseen or factor > _FURTHEST:
            return None
        return max(self.samples + 1, math.ceil(self.samples * factor))

    def _factor(self, tensor: TensorSufficiency) -> float:
        """Return how many times the data would suffice for a tensor."""
        errors = [each for each in (tensor.mse, tensor.importance) if each is not None]
        allowed = self.tolerance / SURE
        factor = (max(errors, default=0.0) / allowed) ** 2
        growth = tensor.minmax or 0.0
        if growth > allowed:
            doublings = 1 / allowed - 1 / growth
            factor = max(factor, 2**doublings if doublings < 64 else math.inf)
        return max(1.0, factor)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data."""
        return {
            "is_sufficient": self.is_sufficient,
            "share": self.share,
            "tolerance": self.tolerance,
            "samples": self.samples,
            "needed_samples": self.needed_samples,
            "unseen": list(self.unseen),
            "worst": [each.tensor for each in self.worst],
            "tensors": [
                {**asdict(each), "readers": list(each.readers)}
                | {"half_tokens": list(each.half_tokens)}
                for each in self.tensors
            ],
        }

    def __repr__(self) -> str:
        enough = sum(each.is_sufficient for each in self.tensors)
        of_all = f"{enough} of {counted(len(self.tensors), 'tensor')} within {self.tolerance:.3g}"
        return f"Sufficiency({of_all}, {counted(self.samples, 'sample')})"


def check_tolerance(tolerance: object, option: str = "tolerance") -> float:
    """Return a tolerance; refuse what is none."""
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if not is_number or not 0 < float(tolerance) < math.inf:  # type: ignore[arg-type]
        raise not_allowed(option, tolerance, "a number above 0, such as 0.1")
    return float(tolerance)  # type: ignore[arg-type]


def check_until_stable(until_stable: object) -> float | None:
    """Return the tolerance within which a run may stop; None where it may not.

    >>> check_until_stable(True), check_until_stable(False), check_until_stable(0.2)
    (0.1, None, 0.2)
    """
    if until_stable is None or until_stable is False:
        return None
    return TOLERANCE if until_stable is True else check_tolerance(until_stable, "until_stable")


def stopping_points(samples: int) -> tuple[int, ...]:
    """Return after how many samples it is looked whether they suffice.

    >>> stopping_points(100)
    (16, 24, 32, 48, 64, 96)
    """
    found = []
    power = FIRST_STOP
    while power < samples:
        found += [power, power * 3 // 2]
        power *= 2
    return tuple(each for each in found if each < samples)


def no_halves() -> MeasurementsError:
    """Return the error of measurements whose halves were not kept apart."""
    return MeasurementsError(
        "do not tell whether the data sufficed: halves of it were not measured apart",
        subject="These measurements",
        hint="They are of an earlier version of Calipers, or merged with such: measure again.",
    )


def sufficiency_of(
    tensors: Iterable[tuple[tuple[str, ...], Statistics, Halves]], samples: int, tolerance: float
) -> Sufficiency:
    """Compare two halves of the data.

    :param tensors: of each distinct tensor its names, what is known of it, and of its halves
    """
    compared = []
    for readers, statistics, halves in tensors:
        first, second = (min(each.num_tokens for each in half.values()) for half in halves)
        tokens = min(each.num_tokens for each in statistics.values())
        movements = dict(_movements(statistics, halves, (first, second)))
        compared.append((readers, tokens, (first, second), movements))  # statistics are let go
    typical = {}
    for kind in ("minmax", "mse", "importance"):
        found = [movements[kind] for *_, movements in compared if kind in movements]
        typical[kind] = median(found) / _MEDIAN_OF_NORMAL if found else 0.0
    rows = []
    for readers, tokens, half_tokens, movements in compared:
        # A standard error, from what this pair of halves and all other tensors tell of it.
        moderated: dict[str, float | None] = dict.fromkeys(typical)
        for kind, movement in movements.items():
            both = math.sqrt((movement**2 + _PRIOR * typical[kind] ** 2) / (1 + _PRIOR))
            moderated[kind] = float(f"{both:.6g}")  # sums in another order round to the same
        known = [value for value in moderated.values() if value is not None]
        is_sufficient = all(half_tokens) and SURE * max(known, default=math.inf) <= tolerance
        rows.append(
            TensorSufficiency(
                readers[0], readers, tokens, half_tokens, **moderated, is_sufficient=is_sufficient
            )
        )
    return Sufficiency(tuple(rows), samples, tolerance)


def _movements(
    whole: Statistics, halves: Halves, tokens: tuple[int, int]
) -> Iterator[tuple[str, float]]:
    """Give what one pair of halves tells of how far each result is from that of more data."""
    if not all(tokens):
        return
    # The variance of a difference of means, a part of which is that of the mean of all.
    part = math.sqrt(tokens[0] * tokens[1]) / sum(tokens)
    for key, first in halves.first.items():
        both = first, halves.second[key]
        if isinstance(whole[key], Extrema):
            ends = [each.fields() for each in both]
            one, other = (
                max(-float(each["min_vals"].min()), float(each["max_vals"].max()), 0.0)
                for each in ends
            )
            largest = max(one, other)
            yield "minmax", abs(one - other) / 2 / largest if largest else 0.0
        elif isinstance(whole[key], SquareSums):
            sums = [each.fields()["_imatrix_sum"] for each in both]
            shares = [each / each.sum() if float(each.sum()) else each for each in sums]
            yield "importance", float((shares[0] - shares[1]).abs().sum()) * part
        elif isinstance(whole[key], ValueCounts):
            one, other = (least_error_scale(each) for each in both)
            scale = least_error_scale(whole[key])
            yield "mse", abs(one - other) * part / scale if scale else 0.0


def least_error_scale(counts: Any) -> float:
    """Return the scale of int8 with the least squared error over all values of a tensor."""
    distributions = list(counts.distributions())
    values = torch.cat([each.values for each in distributions])
    low, high = values.min().reshape(1), values.max().reshape(1)
    scale, _ = least_error(CountedValues(distributions[:1], low, high, _INT8))
    return float(scale)
