"""The statistics of each tensor of a model, their merging, and folds of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias, get_args

import torch

from calipers.errors import CalipersError, MergeError, shortened
from calipers.registry import Registry
from calipers.statistics.base import Form, Reduction, Statistic
from calipers.statistics.sums import HessianSums, NonFinite
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
                copy = statistic.empty()
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


FOLDS = tuple(
    f"{number}/"
    for number in ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
)
"""What the keys of statistics begin with that are of a fold of the data alone."""
_KEPT = ("counts", "extrema", "squares", "hessian")
"""The keys of what a file keeps of each fold."""
_COMPARED = ("counts", "extrema", "squares")
"""The keys by which halves of the data are compared."""


class Halves(NamedTuple):
    """The statistics of a tensor in the first half of the data and in the second, by their keys."""

    first: Statistics
    second: Statistics


def fold_of(key: str) -> str:
    """Return what the key of a statistic of one fold begins with; nothing for that of all data.

    >>> fold_of("second/counts"), fold_of("counts")
    ('second/', '')
    """
    return next((prefix for prefix in FOLDS if key.startswith(prefix)), "")


def whole_beside(key: str, statistics: Statistics) -> Statistic | None:
    """Return the statistic of all data of which one is of a fold; None for one that is of none."""
    return statistics.get(key.removeprefix(fold_of(key))) if fold_of(key) else None


def whole_of(tensors: Tensors) -> dict[Place, dict[str, Statistic]]:
    """Return the statistics of all data alone."""
    return {
        place: {key: each for key, each in statistics.items() if not fold_of(key)}
        for place, statistics in tensors.items()
    }


def with_folds(folds: Sequence[Tensors]) -> dict[Place, dict[str, Statistic]]:
    """Return the statistics of all data, and beside them what is kept of folds.

    :param folds: what was seen of each; the first has also what is not measured in folds
    """
    first, *others = map(unified, folds)  # tensors that are one are added once
    apart = others[0] if others else {}
    parted = {
        place: {key: each for key, each in statistics.items() if key in apart.get(place, {})}
        for place, statistics in first.items()
    }
    parted = {place: each for place, each in parted.items() if each}
    whole = reduce(merged, others, parted)
    both = {place: {**each, **whole.get(place, {})} for place, each in first.items()}
    folds = [parted, *others] if others else []
    for prefix, fold in zip(FOLDS, folds, strict=False):
        is_last = fold is others[-1]
        for place, statistics in fold.items():
            both[place] |= {
                prefix + key: statistics[key]
                for key in _KEPT
                if key in statistics and not (is_last and isinstance(statistics[key], ValueCounts))
            }
    return both


def without_last_hessians(tensors: Tensors) -> dict[Place, Statistics]:
    """Leave out the Hessians of the last fold, which all others tell but for rounding.

    As long as data runs they are needed: sums go on from them, to the bit.
    """
    last = FOLDS[max(map(num_folds, tensors.values()), default=1) - 1]
    return {
        place: {
            key: each
            for key, each in statistics.items()
            if not (fold_of(key) == last and isinstance(each, HessianSums))
        }
        for place, statistics in tensors.items()
    }


def missing_halves(statistics: Statistics) -> dict[str, Statistic]:
    """Return what files of earlier versions leave out: sums of the second half, by subtraction."""
    first, second = FOLDS[:2]
    if first + "squares" not in statistics or second + "squares" in statistics:
        return {}
    seen = _difference(statistics["squares"], [statistics[first + "squares"]])
    return {second + "squares": seen}


def parted(tensors: Tensors) -> list[dict[Place, Statistics]]:
    """Return what was seen of each fold, from which whoever measures can go on.

    What is not kept of folds counts as seen in the first. Tensors that are one stay one.
    """
    count = max(map(num_folds, tensors.values()), default=1)
    known: dict[tuple[int, ...], list[Statistics]] = {}
    found: list[dict[Place, Statistics]] = [{} for _ in range(count)]
    for place, statistics in tensors.items():
        identity = tuple(map(id, statistics.values()))
        if identity not in known:
            folds = {key: folds_of(statistics, key) for key in statistics if not fold_of(key)}
            known[identity] = [
                {key: each[number] for key, each in folds.items() if number < len(each)}
                for number in range(count)
            ]
        for fold, own in zip(found, known[identity], strict=True):
            fold[place] = own
    return found


def num_folds(statistics: Statistics) -> int:
    """Return how many folds of a tensor are known; 1 where nothing was kept apart."""
    counts = [1]
    for key, whole in statistics.items():
        if not fold_of(key):
            kept = _kept_of_folds(statistics, key)
            counts.append(len(kept) + _is_last_told(whole, kept))
    return max(counts)


def folds_of(statistics: Statistics, key: str) -> list[Statistic]:
    """Return what each fold tells of a tensor; the whole alone where nothing was kept apart."""
    whole = statistics[key]
    kept = _kept_of_folds(statistics, key)
    if _is_last_told(whole, kept):
        kept.append(_difference(whole, kept))
    return kept or [whole]


def _kept_of_folds(statistics: Statistics, key: str) -> list[Statistic]:
    return [statistics[prefix + key] for prefix in FOLDS if prefix + key in statistics]


def _is_last_told(whole: Statistic, kept: Sequence[Statistic]) -> bool:
    """Whether the last fold is not kept, but is what the whole has beyond the others."""
    if isinstance(whole, HessianSums):  # that of the last one is kept while data still runs
        return 0 < sum(each.num_tokens for each in kept) < whole.num_tokens
    return bool(kept) and isinstance(whole, ValueCounts)


def halves_of(statistics: Statistics) -> Halves | None:
    """Return what is known of both halves of a tensor; None where nothing was kept apart.

    Every other fold is of the first half.
    """
    folds = {
        key: known
        for key in _COMPARED
        if key in statistics and len(known := folds_of(statistics, key)) > 1
    }
    if not folds:
        return None
    first, second = (
        {key: reduce(_sum, known[start::2]) for key, known in folds.items()} for start in (0, 1)
    )
    return Halves(first, second)


def _sum(one: Statistic, other: Statistic) -> Statistic:
    both = one.empty()
    both.copy_from(one)
    return both.merge(other)


def _difference(whole: Statistic, folds: Sequence[Statistic]) -> Statistic:
    """Return what the whole has seen beyond some folds."""
    made = whole.empty()
    if whole.num_tokens > sum(each.num_tokens for each in folds):
        fields = whole.fields()
        may_be_negative = isinstance(whole, HessianSums)  # others are by rounding alone
        for fold in folds:
            for name, value in fold.fields().items():
                rest = fields[name] - value
                fields[name] = rest if may_be_negative else rest.clamp(min=0)
        made.load_fields({n: v for n, v in fields.items() if n not in TABLES or bool(v.any())})
    return made


def problem_with_folds(statistics: Mapping[str, Statistic]) -> str | None:
    """Say why folds cannot be those of a whole, if they cannot."""
    for key, fold in statistics.items():
        prefix = fold_of(key)
        if not prefix:
            continue
        name = key.removeprefix(prefix)
        earlier = FOLDS[: FOLDS.index(prefix)]
        if not all(each + name in statistics for each in earlier):
            return f"there is {key}, and not what was seen of each fold before it"
        whole = whole_beside(key, statistics)
        if whole is None or whole.configuration() != fold.configuration():
            return f"{key} is of something that the whole is not of"
        problem = _problem_with_part(fold, whole)
        if problem is not None:
            return f"{key}: {problem}"
    return None


def _problem_with_part(part: Statistic, whole: Statistic) -> str | None:
    fields = whole.fields()
    for name, value in part.fields().items():
        of_whole = fields.get(name)
        if of_whole is None or value.shape != of_whole.shape:
            is_part = False
        elif whole.declared()[name] is Reduction.MIN:
            is_part = bool((value >= of_whole).all())
        else:
            if isinstance(whole, HessianSums) and value.ndim:  # products may be below zero
                value, of_whole = (x.diagonal(dim1=-2, dim2=-1) for x in (value, of_whole))
            # Sums may have been added in another order.
            slack = 1e-9 * of_whole.abs() if whole.form_of(name) is Form.SUM else 0
            is_part = bool((value <= of_whole + slack).all())
        if not is_part:
            return f"{name} is not that of a part of the whole"
    return None
