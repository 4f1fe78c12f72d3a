"""How large the values of tensors are, and numbers laid out by layer and kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from calipers.statistics.base import Statistic
from calipers.statistics.value_counts import ValueCounts
from calipers.topology.names import split_layer, without_numbers


@dataclass(frozen=True)
class Magnitudes:
    """How large values are: how often magnitudes occurred, by powers of two or parts of them.

    Bin i of so many to an octave holds 2^((exponent+i)/parts) ≤ |x| < 2^((exponent+i+1)/parts).

    :param rms: √(Σx² / n) over all finite values
    :param exponent: of the first bin
    """

    rms: float
    largest: float
    zeros: int
    exponent: int
    counts: tuple[int, ...]

    @classmethod
    def of(
        cls, values: Tensor, counts: Tensor, parts: int = 1, most: int | None = None
    ) -> Magnitudes:
        """Count magnitudes, given finite values and how often each occurred.

        :param most: at most so many octaves: the first bin holds all smaller magnitudes, too

        >>> Magnitudes.of(torch.tensor([-1.0, 0.0, 4.0]), torch.tensor([8, 7, 1]))
        Magnitudes(rms=1.224744871391589, largest=4.0, zeros=7, exponent=0, counts=(8, 0, 1))
        """
        sizes, total = values.double().abs(), int(counts.sum())
        rms = math.sqrt(float((sizes.square() * counts).sum()) / total) if total else math.nan
        is_zero = sizes == 0
        zeros = int(counts[is_zero].sum())
        sizes, counts = sizes[~is_zero], counts[~is_zero]
        if not len(sizes):
            return cls(rms, 0.0, zeros, 0, ())
        bins = (sizes.log2() * parts).floor().long()
        first, last = int(bins.min()), int(bins.max())
        first = first if most is None else max(first, last - most * parts)
        places = (bins - first).clamp(min=0)
        summed = counts.new_zeros(last - first + 1).index_add_(0, places, counts)
        return cls(rms, float(sizes.max()), zeros, first, tuple(summed.tolist()))

    @property
    def peak(self) -> float:
        """How extreme the values are: max|x| ÷ rms; 0 where all are zero."""
        return self.largest / self.rms if self.rms else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"zeros": self.zeros, "exponent": self.exponent, "counts": list(self.counts)}


def magnitudes_of(statistics: Mapping[str, Statistic]) -> Magnitudes | None:
    """Return how large values were; None where they were not counted."""
    counted = [each for each in statistics.values() if isinstance(each, ValueCounts)]
    parts = list(counted[0].distributions()) if counted and counted[0].fields() else []
    if not sum(int(part.counts.sum()) for part in parts):
        return None
    values = torch.cat([part.values for part in parts])
    return Magnitudes.of(values, torch.cat([part.counts for part in parts]))


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
    """
    cells: dict[tuple[str, str], float] = {}
    for name, number in numbers.items():
        layer, rest = split_layer(name)
        place = layer, without_numbers(rest)
        cells[place] = max(number, cells.get(place, number))
    layers = sorted(dict.fromkeys(layer for layer, _ in cells), key=_by_number)
    kinds = list(dict.fromkeys(kind for _, kind in cells))
    short = []  # the shortest ends of names by which they are told apart
    for kind in kinds:
        others = [f".{other}" for other in kinds if other != kind]
        parts = kind.split(".")
        ends = (".".join(parts[-length:]) for length in range(1, len(parts)))
        unique = (end for end in ends if not any(o.endswith(f".{end}") for o in others))
        short.append(next(unique, kind))
    values = tuple(tuple(cells.get((layer, kind)) for kind in kinds) for layer in layers)
    # Where all layers are of one stack, numbers tell them apart.
    one_stack = len({layer.rpartition(".")[0] for layer in layers if layer}) == 1
    names = (layer.rpartition(".")[2] if one_stack else layer for layer in layers)
    return LayerGrid(tuple(name or OUTSIDE for name in names), tuple(short), values)


def _by_number(layer: str) -> tuple[bool, str, int]:
    """Order the layers of a stack by their numbers; what is in none comes last."""
    stack, _, number = layer.rpartition(".")
    return not number, stack, int(number or 0)
