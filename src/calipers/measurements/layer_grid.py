"""Numbers of a model's modules or tensors, laid out by layer and by kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from calipers.topology.names import split_layer, without_numbers

OUTSIDE = "–"
"""Stands for the layer of what is in none."""


@dataclass(frozen=True)
class LayerGrid:
    """Numbers by layer and kind; None where a layer has no such module.

    :param layers: the names of the rows: numbers, where all layers are of one stack
    :param kinds: the names of the columns, as short as they can be told apart
    :param values: a row for each layer
    """

    layers: tuple[str, ...]
    kinds: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        rows = [list(row) for row in self.values]
        return {"layers": list(self.layers), "kinds": list(self.kinds), "values": rows}


def layer_grid(numbers: Mapping[str, float]) -> LayerGrid:
    """Lay numbers out by layer and kind; of several of one kind, as experts are, the largest.

    :param numbers: module or tensor → a number

    >>> grid = layer_grid({"layers.0.mlp.up_proj": 1.0, "layers.1.mlp.up_proj": 2.0, "head": 3.0})
    >>> grid.layers, grid.kinds, grid.values
    (('0', '1', '–'), ('up_proj', 'head'), ((1.0, None), (2.0, None), (None, 3.0)))
    """
    cells: dict[tuple[str, str], float] = {}
    for name, number in numbers.items():
        layer, rest = split_layer(name)
        place = layer, without_numbers(rest)
        cells[place] = max(number, cells.get(place, number))
    layers = sorted(dict.fromkeys(layer for layer, _ in cells), key=_by_number)
    kinds = list(dict.fromkeys(kind for _, kind in cells))
    values = tuple(tuple(cells.get((layer, kind)) for kind in kinds) for layer in layers)
    return LayerGrid(_row_names(layers), _column_names(kinds), values)


def _by_number(layer: str) -> tuple[bool, str, int]:
    """Order the layers of a stack by their numbers; what is in none comes last."""
    stack, _, number = layer.rpartition(".")
    return not number, stack, int(number or 0)


def _row_names(layers: Iterable[str]) -> tuple[str, ...]:
    parts = [layer.rpartition(".") for layer in layers]
    one_stack = len({stack for stack, _, number in parts if number}) == 1
    names = (number if one_stack else f"{stack}{dot}{number}" for stack, dot, number in parts)
    return tuple(name or OUTSIDE for name in names)


def _column_names(kinds: Iterable[str]) -> tuple[str, ...]:
    """Return the shortest ends of names by which they are told apart."""
    parts = [kind.split(".") for kind in kinds]
    return tuple(
        next(
            end
            for length in range(1, len(each) + 1)
            if (end := ".".join(each[-length:])) and _is_one_of(end, each, parts)
        )
        for each in parts
    )


def _is_one_of(end: str, mine: list[str], parts: list[list[str]]) -> bool:
    others = (other for other in parts if other != mine)
    length = end.count(".") + 1
    return length == len(mine) or all(".".join(other[-length:]) != end for other in others)
