"""How many numbers are worked on at once, and how work is cut into that."""

from __future__ import annotations

from collections.abc import Iterator

import torch

TILE = 1 << 22  # numbers, where temporaries are what has to stay small
_CACHED = 1 << 20  # what the caches of a CPU hold
_PARALLEL = 1 << 24  # what keeps the cores of other devices busy


def tile_for(device: torch.device) -> int:
    """Return how many numbers a device works on best, where the same ones are read many times."""
    return _CACHED if device.type == "cpu" else _PARALLEL


def runs(count: int, each: int = 1, tile: int = TILE) -> Iterator[slice]:
    """Cut ``count`` things of ``each`` numbers into runs of about one tile, at least one thing.

    >>> list(runs(5, each=3, tile=7))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, tile // max(1, each))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
