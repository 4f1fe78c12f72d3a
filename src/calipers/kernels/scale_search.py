"""What a search for the best scales is given, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.numerics.formats import Format
from calipers.numerics.scales import Window


class Optimum(NamedTuple):
    """The best candidates of each piece, in the last dimension, the best one first.

    Scales twice as large as need be, which cannot be best alone, are not among them.

    ``scales`` are positive, in float32 or float64, and zero where a piece has only zeros;
    ``windows`` says which window goes with each, ``errors`` is Σ w·|q−x|^norm in float64. Where a
    piece has fewer candidates than were asked for, the last one is repeated.
    """

    scales: Tensor
    windows: Tensor
    errors: Tensor


class ScaleSearch(NamedTuple):
    """What is searched. Weights have the shape of the pieces; ranges one number per piece."""

    pieces: Tensor
    low: Tensor
    high: Tensor
    fmt: Format
    windows: Sequence[Window]
    storable: Tensor | None
    norm: float
    weights: Tensor | None
    keep: int
    most: float = torch.inf


def overflows(
    search: ScaleSearch,
    scales: Tensor,
    zero: Tensor | float,
    lowest: Tensor | float,
    highest: Tensor | float,
) -> Tensor:
    """Whether an extremum, hence any value, becomes too large: scales are (pieces, candidates)."""
    ends = torch.stack([search.low, search.high]).to(scales).unsqueeze(-1)
    codes = (ends / scales.masked_fill(scales == 0, 1) + zero).clamp(
        torch.as_tensor(lowest, device=scales.device),
        torch.as_tensor(highest, device=scales.device),
    )
    largest = (search.fmt.round_(codes) - zero).mul_(scales).abs_().amax(0)
    return ~(largest <= search.most)
