"""Two halves of the data, measured apart: what the whole does not tell of them is kept beside it.

A sample belongs to a half by its digest, so that halves merge like everything else, in whatever
order, and whichever process has seen it. A few statistics are kept of both halves. Counts of the
second are what the whole has beyond the first, exactly; extrema and sums of floats cannot be worked
out to the bit, and are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.measurements.kinds import statistic_of
from calipers.measurements.tensors import Place, Statistics, Tensors, merged, unified
from calipers.statistics.base import Statistic
from calipers.statistics.value_counts import TABLES, ValueCounts

FIRST, SECOND = "first/", "second/"
_KEPT = ("counts", "extrema", "squares")
"""The keys of what solvers read that need no more than a tensor: they are kept of each half."""


class Halves(NamedTuple):
    """The statistics of a tensor in the first half of the data and in the second, by their keys."""

    first: Statistics
    second: Statistics


def is_of_half(key: str) -> bool:
    """Whether a key is that of a statistic of one half.

    >>> is_of_half("first/counts"), is_of_half("counts")
    (True, False)
    """
    return key.startswith((FIRST, SECOND))


def whole_beside(key: str, statistics: Statistics) -> Statistic | None:
    """Return the statistic of all data of which one is of a half; None for one that is of none."""
    return statistics.get(key.partition("/")[2]) if is_of_half(key) else None


def whole_of(tensors: Tensors) -> dict[Place, dict[str, Statistic]]:
    """Return the statistics of all data alone."""
    return {
        place: {key: each for key, each in statistics.items() if not is_of_half(key)}
        for place, statistics in tensors.items()
    }


def with_halves(first: Tensors, second: Tensors) -> dict[Place, dict[str, Statistic]]:
    """Return the statistics of all data, and beside them what is kept of halves.

    :param first: what was seen of the first half, and what is not measured in halves
    :param second: what was seen of the second half
    """
    # Tensors that are one are added once.
    first, second = unified(first), unified(second)
    halved = {
        place: {key: each for key, each in statistics.items() if key in second.get(place, {})}
        for place, statistics in first.items()
    }
    whole = merged({place: each for place, each in halved.items() if each}, second)
    return {
        place: {
            **{key: whole.get(place, {}).get(key, each) for key, each in statistics.items()},
            **_kept(halved[place], second.get(place, {})),
        }
        for place, statistics in first.items()
    }


def _kept(first: Statistics, second: Statistics) -> dict[str, Statistic]:
    kept = {FIRST + key: first[key] for key in _KEPT if key in first}
    return kept | {
        SECOND + key: second[key]
        for key in _KEPT
        if key in second and not isinstance(second[key], ValueCounts)
    }


def missing_halves(statistics: Statistics) -> dict[str, Statistic]:
    """Return what files of earlier versions leave out: sums of the second half, by subtraction."""
    return {
        SECOND + key: _difference(statistics[key], statistics[FIRST + key])
        for key in _KEPT
        if FIRST + key in statistics
        and SECOND + key not in statistics
        and not isinstance(statistics[key], ValueCounts)
    }


def parted(tensors: Tensors) -> tuple[dict[Place, Statistics], dict[Place, Statistics]]:
    """Return what was seen of each half, from which whoever measures can go on.

    What is not kept of halves counts as seen in the first. Tensors that are one stay one.
    """
    made: dict[tuple[int, ...], Halves] = {}
    for statistics in tensors.values():
        key = _identity(statistics)
        if key not in made:
            whole = {name: each for name, each in statistics.items() if not is_of_half(name)}
            first, second = halves_of(statistics) or Halves({}, {})
            made[key] = Halves({**whole, **first}, second)
    found = {place: made[_identity(statistics)] for place, statistics in tensors.items()}
    return (
        {place: each.first for place, each in found.items()},
        {place: each.second for place, each in found.items()},
    )


def _identity(statistics: Statistics) -> tuple[int, ...]:
    return tuple(map(id, statistics.values()))


def halves_of(statistics: Statistics) -> Halves | None:
    """Return what is known of both halves of a tensor; None where nothing was kept apart."""
    first = {key: statistics[FIRST + key] for key in _KEPT if FIRST + key in statistics}
    if not first:
        return None
    second = {
        key: statistics.get(SECOND + key) or _difference(statistics[key], each)
        for key, each in first.items()
    }
    return Halves(first, second)


def _difference(whole: Statistic, first: Statistic) -> Statistic:
    """Return what the whole has seen beyond the first half."""
    made = statistic_of(whole.configuration())
    made.owner = whole.owner
    if whole.num_tokens > first.num_tokens:
        known = first.fields()
        fields = {
            name: _beyond(value, known[name]) if name in known else value
            for name, value in whole.fields().items()
        }
        made.load_fields({n: v for n, v in fields.items() if n not in TABLES or bool(v.any())})
    return made


def _beyond(whole: Tensor, first: Tensor) -> Tensor:
    return (whole - first).clamp(min=0)  # what is below zero is rounding


def problem_with_halves(statistics: Mapping[str, Statistic]) -> str | None:
    """Say why halves cannot be those of a whole, if they cannot."""
    for key, half in statistics.items():
        if not is_of_half(key):
            continue
        whole = whole_beside(key, statistics)
        if whole is None or whole.configuration() != half.configuration():
            return f"{key} is of something that the whole is not of"
        fields = whole.fields()
        for name, value in half.fields().items():
            if name not in fields or not _is_part(name, value, fields[name]):
                return f"{key}: {name} is not that of a part of the whole"
    return None


def _is_part(name: str, half: Tensor, whole: Tensor) -> bool:
    if half.shape != whole.shape:
        return False
    if name == "min_vals":
        return bool((half >= whole).all())
    if name.endswith("_sum"):
        slack = 1e-9 * whole.abs()  # sums that were added in another order
        return bool((half <= whole + slack).all())
    return bool(torch.all(half <= whole))
