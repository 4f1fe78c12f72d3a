"""The best of all scales, natively."""

from __future__ import annotations

import torch

from calipers.kernels.native import BACKEND, library
from calipers.kernels.optimum import (
    Optimum,
    ScaleSearch,
    optimum_in_torch,
    overflows,
    sweep_scales,
    try_scales,
)
from calipers.kernels.resources import num_threads
from calipers.numerics.formats import halvable_from, magnitudes_of
from calipers.numerics.layout import as_grid, by_piece


@try_scales.register(BACKEND)
@sweep_scales.register(BACKEND)
def _best_scales(search: ScaleSearch) -> Optimum:
    kernels = library()
    values = as_grid(search.pieces, ordered=True)
    weights = None if search.weights is None else as_grid(search.weights, ordered=True)
    low, high = (bound.float().contiguous() for bound in (search.low, search.high))
    windows = torch.tensor(search.windows, dtype=torch.float32, device="cpu")
    found = Optimum(
        low.new_empty(len(low), search.keep),
        low.new_empty(len(low), search.keep, dtype=torch.int32),
        low.new_empty(len(low), search.keep, dtype=torch.float64),
    )
    given = kernels.ScaleSearch(
        values=values,
        weights=weights,
        low=low,
        high=high,
        windows=windows,
        best=found.scales,
        window=found.windows,
        errors=found.errors,
    )
    if search.storable is None:
        kernels.sweep(given, magnitudes=magnitudes_of(search.fmt), threads=num_threads())
    else:
        storable = search.storable.float().contiguous()
        kernels.optimum(
            given,
            storable=storable,
            halvable=halvable_from(storable),
            most=search.most,
            grid=search.fmt.grid.native_name,
            shifted=any(window.zero for window in search.windows),
            norm=search.norm,
            threads=num_threads(),
        )
    # A value becomes at most twice as large.
    may_overflow = torch.maximum(-search.low, search.high).double() > search.most / 2
    return _without_overflow(search, found) if bool(may_overflow.any()) else found


def _without_overflow(search: ScaleSearch, found: Optimum) -> Optimum:
    """Search the few pieces again whose values become too large.

    A sweep is not told of that, and other searches do not go by how ties are rounded.
    """
    ends = torch.tensor(search.windows, device=found.scales.device)[found.windows.long()]
    zero, lowest, highest = ends[..., :3].unbind(-1)
    again = overflows(search, found.scales, zero, lowest, highest).any(1).nonzero().squeeze(1)
    if not len(again):
        return found
    weights = search.weights
    few = search._replace(
        pieces=by_piece(search.pieces)[again][None, :, None],
        weights=None if weights is None else by_piece(weights)[again][None, :, None],
        low=search.low[again],
        high=search.high[again],
    )
    found_again = optimum_in_torch(few)
    parts = (old.index_copy(0, again, new) for old, new in zip(found, found_again, strict=True))
    return Optimum(*parts)
