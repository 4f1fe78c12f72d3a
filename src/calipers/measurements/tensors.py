"""The statistics of each tensor of a model: which tensors are one, and how two runs become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from calipers.errors import MergeError, shortened
from calipers.measurements.kinds import statistic_of
from calipers.statistics.base import Statistic

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
            if readers[0][1] == place[1] and _are_equal(known, statistics):
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
    made: dict[tuple[int, int], Statistic] = {}  # what is shared in both is shared again
    return {
        place: {key: _sum(made, statistic, theirs[place][key]) for key, statistic in each.items()}
        for place, each in mine.items()
    }


def _sum(made: dict[tuple[int, int], Statistic], mine: Statistic, theirs: Statistic) -> Statistic:
    pair = id(mine), id(theirs)
    if pair not in made:
        found = statistic_of(mine.configuration())
        found.owner = mine.owner
        found.copy_from(mine)
        made[pair] = found.merge(theirs)
    return made[pair]


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
    """Return the name of a tensor.

    >>> name_of(("layers.0.up_proj", "input"))
    'layers.0.up_proj.input'
    """
    return ".".join(place)


def _outline(statistics: Statistics) -> object:
    """Return what equal statistics have in common, and others hardly."""
    return tuple((key, _look(each)) for key, each in sorted(statistics.items()))


def _look(statistic: Statistic) -> object:
    """Return a part of what a statistic knows; what is in a file is there once, and not read."""
    if statistic.deferred():
        return id(statistic)
    return str(statistic.configuration()), tuple(map(_glimpse, statistic.fields().values()))


def _glimpse(value: torch.Tensor) -> object:
    middle = value.reshape(-1)[value.numel() // 2 :][:1]
    return value.dtype, tuple(value.shape), *middle.tolist()


def _are_equal(one: Statistics, other: Statistics) -> bool:
    return all(_is_equal(one[key], other[key]) for key in one)


def _is_equal(one: Statistic, other: Statistic) -> bool:
    if one is other:
        return True
    ours, theirs = one.fields(), other.fields()
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]] = [(ours[n], theirs[n]) for n in ours]
    return ours.keys() == theirs.keys() and all(a is b or torch.equal(a, b) for a, b in pairs)
