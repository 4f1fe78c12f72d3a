"""Combinations of parameters, few of them: any two values of two parameters meet in one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

Choice = tuple[int, int]
"""A parameter, and the position of one of its values."""


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each parameter, always the same ones.

    Most mistakes depend on one or two parameters: a format with a dtype, a shape with an order in
    memory. A full product tries every pair again and again.

    >>> pairwise("ab", [1, 2], "xy")
    [('a', 1, 'x'), ('a', 2, 'y'), ('b', 1, 'y'), ('b', 2, 'x')]
    """
    missing = dict.fromkeys(_all_pairs([len(values) for values in parameters]))
    rows: list[tuple[int, ...]] = []
    while missing:
        chosen = dict(next(iter(missing)))
        for parameter in sorted(set(range(len(parameters))) - chosen.keys()):
            size = len(parameters[parameter])
            turns = [(len(rows) + value) % size for value in range(size)]
            new = [_count(missing, chosen, (parameter, value)) for value in turns]
            chosen[parameter] = turns[new.index(max(new))]
        rows.append(tuple(chosen[parameter] for parameter in range(len(parameters))))
        for pair in combinations(enumerate(rows[-1]), 2):
            missing.pop(pair, None)
    return [
        tuple(values[position] for values, position in zip(parameters, row, strict=True))
        for row in rows
    ]


def in_turns(names: Sequence[Any], *others: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return a row for each of the names, and let the values of others take turns.

    >>> in_turns("abc", [1, 2])
    [('a', 1), ('b', 2), ('c', 1)]
    """
    return [
        (name, *(values[number % len(values)] for values in others))
        for number, name in enumerate(names)
    ]


def _all_pairs(sizes: Sequence[int]) -> Iterator[tuple[Choice, Choice]]:
    for one, other in combinations(range(len(sizes)), 2):
        for pair in product(range(sizes[one]), range(sizes[other])):
            yield (one, pair[0]), (other, pair[1])


def _count(missing: dict[Any, None], chosen: dict[int, int], new: Choice) -> int:
    """Return how many pairs are met for the first time."""
    pairs = (tuple(sorted((each, new))) for each in chosen.items())
    return sum(pair in missing for pair in pairs)
