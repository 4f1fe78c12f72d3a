"""The statistics of each tensor of a model, their merging, and halves of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, get_args

import torch

from calipers.errors import CalipersError, MergeError, shortened
from calipers.registry import Registry
from calipers.statistics.base import Form, Reduction, Statistic
from calipers.statistics.sums import NonFinite
from calipers.statistics.value_counts import TABLES, ValueCounts

STATISTICS: Registry[type[Statistic]] = Registry(
    "statistic",
    "calipers.statistics",
    {
        "BlockHessians": "calipers.statistics.sums:BlockHessians",
        "Extrema": "calipers.statistics.ranges:Extrema",
        "Sensitivity": "calipers.statistics.sums:Sensitivity",
        "SquareSums": "calipers.statistics.sums:SquareSums",
        "ValueCounts": "calipers.statistics.value_counts:ValueCounts",
    },
    base=Statistic,
)
"""The statistics that a file can have, by the names of their classes."""


def statistic_of(configuration: Mapping[str, Any]) -> Statistic:
    """Return an empty statistic of a configuration; ValueError where there is none."""
    options = dict(configuration)
    kind = options.pop("class", None)
    if kind not in STATISTICS:
        raise ValueError(f"there is no statistic {kind!r}")
    width = options.get("width", 1)
    is_width = isinstance(width, int) and width > 0
    if not is_width or options.get("nonfinite", "keep") not in get_args(NonFinite):
        raise ValueError(f"there is no {kind} of {options}")
    try:
        made = STATISTICS.get(str(kind)).from_configuration(options)
    except (CalipersError, KeyError, TypeError) as error:
        raise ValueError(f"there is no {kind} of {options}: {error}") from error
    if _given(made.configuration()) != _given(configuration):
        raise ValueError(f"there is no {kind} of {options}")
    return made


def _given(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says; what it leaves out may be there as None or not at all."""
    return {name: value for name, value in configuration.items() if value is not None}


Place: TypeAlias = tuple[str, str]
"""A module, and which of its tensors: ``input``, ``output``, ``q``, ``k`` or ``v``."""
Statistics: TypeAlias = Mapping[str, Statistic]
"""The statistics of a tensor, by their keys."""
Tensors: TypeAlias = Mapping[Place, Statistics]


def readers_of(tensors: Tensors) -> list[tuple[list[Place], Statistics]]:
    """Return the distinct tensors, each with all the places where it is read.

    Tensors are one if all that is known of them is the same: that of q, k and v is.
    """
    groups: dict[object, list[tuple[list[Place], Statistics]]] = {}
    for place, statistics in tensors.items():
        alike = groups.setdefault(_outline(statistics), [])
        for readers, known in alike:
            if readers[0][1] != place[1]:
                continue
            if all(_is_equal(known[key], statistics[key]) for key in known):
                readers.append(place)
                break
        else:
            alike.append(([place], statistics))
    order = {place: index for index, place in enumerate(tensors)}
    found = [group for alike in groups.values() for group in alike]
    return sorted(found, key=lambda group: order[group[0][0]])


def unified(tensors: Tensors) -> dict[Place, Statistics]:
    """Return the same, in which tensors that are one have the same statistics."""
    found = {place: known for readers, known in readers_of(tensors) for place in readers}
    return {place: found[place] for place in tensors}


def merged(mine: Tensors, theirs: Tensors) -> dict[Place, dict[str, Statistic]]:
    """Return new statistics of what both have seen; refuse others than the same of both."""
    check_same(mine, theirs)
    sums: dict[tuple[int, int], Statistic] = {}  # what is shared in both is shared again
    both: dict[Place, dict[str, Statistic]] = {place: {} for place in mine}
    for place, statistics in mine.items():
        for key, statistic in statistics.items():
            other = theirs[place][key]
            pair = id(statistic), id(other)
            if pair not in sums:
                copy = statistic_of(statistic.configuration())
                copy.owner = statistic.owner
                copy.copy_from(statistic)
                sums[pair] = copy.merge(other)
            both[place][key] = sums[pair]
    return both


def check_same(mine: Tensors, theirs: Tensors) -> None:
    """Refuse statistics that one side lacks; those of other configurations refuse each other."""
    for one, other, where in ((mine, theirs, "here"), (theirs, mine, "there")):
        lacking = [
            f"{name_of(place)}/{key}"
            for place, statistics in one.items()
            for key in statistics
            if key not in other.get(place, {})
        ]
        if lacking:
            raise MergeError(
                f"Cannot merge: statistics were measured {where} alone: {shortened(lacking, 3)}",
                hint="Collect the same in both runs.",
            )


def name_of(place: Place) -> str:
    """Return the name of a tensor, such as layers.0.up_proj.input."""
    return ".".join(place)


def _outline(statistics: Statistics) -> object:
    """Return what equal statistics have in common, and others hardly."""
    parts: list[object] = []
    for key, statistic in sorted(statistics.items()):
        if statistic.deferred():  # what is in a file is there once, and not read
            parts.append((key, id(statistic)))
            continue
        for value in statistic.fields().values():
            middle = value.reshape(-1)[value.numel() // 2 :][:1]
            parts.append((value.dtype, tuple(value.shape), *middle.tolist()))
        parts.append((key, str(statistic.configuration())))
    return tuple(parts)


def _is_equal(one: Statistic, other: Statistic) -> bool:
    if one is other:
        return True
    ours, theirs = one.fields(), other.fields()
    pairs = [(ours[name], theirs[name]) for name in ours if name in theirs]
    return ours.keys() == theirs.keys() and all(a is b or torch.equal(a, b) for a, b in pairs)


FIRST, SECOND = "first/", "second/"
_KEPT = ("counts", "extrema", "squares")
"""The keys of what solvers read that need no more than a tensor: they are kept of each half."""


class Halves(NamedTuple):
    """The statistics of a tensor in the first half of the data and in the second, by their keys."""

    first: Statistics
    second: Statistics


def is_of_half(key: str) -> bool:
    """Whether a key is that of a statistic of one half."""
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
    both: dict[Place, dict[str, Statistic]] = {}
    for place, statistics in first.items():
        both[place] = {key: whole.get(place, {}).get(key, s) for key, s in statistics.items()}
        one, other = halved[place], second.get(place, {})
        both[place] |= {FIRST + key: one[key] for key in _KEPT if key in one}
        both[place] |= {
            SECOND + key: other[key]
            for key in _KEPT
            if key in other and not isinstance(other[key], ValueCounts)
        }
    return both


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
    known: dict[tuple[int, ...], Halves] = {}
    firsts: dict[Place, Statistics] = {}
    seconds: dict[Place, Statistics] = {}
    for place, statistics in tensors.items():
        identity = tuple(map(id, statistics.values()))
        if identity not in known:
            whole = {name: each for name, each in statistics.items() if not is_of_half(name)}
            first, second = halves_of(statistics) or Halves({}, {})
            known[identity] = Halves({**whole, **first}, second)
        firsts[place], seconds[place] = known[identity]
    return firsts, seconds


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
        known, fields = first.fields(), whole.fields()
        for name in fields.keys() & known.keys():
            fields[name] = (fields[name] - known[name]).clamp(min=0)  # below zero is rounding
        made.load_fields({n: v for n, v in fields.items() if n not in TABLES or bool(v.any())})
    return made


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
            of_whole = fields.get(name)
            if of_whole is None or value.shape != of_whole.shape:
                is_part = False
            elif whole.declared()[name] is Reduction.MIN:
                is_part = bool((value >= of_whole).all())
            else:  # sums may have been added in another order
                slack = 1e-9 * of_whole.abs() if whole.form_of(name) is Form.SUM else 0
                is_part = bool((value <= of_whole + slack).all())
            if not is_part:
                return f"{key}: {name} is not that of a part of the whole"
    return None
