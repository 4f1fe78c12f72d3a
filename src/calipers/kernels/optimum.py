"""The best of all scales that can be stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from calipers.kernels.counts import are_worth_counting, distinct_values
from calipers.kernels.dispatch import NativeKernels, as_grid, native_for
from calipers.kernels.optimum_in_torch import optimum_in_torch
from calipers.kernels.polishing import polished
from calipers.kernels.scale_search import Optimum, ScaleSearch, by_piece, length_of, overflows
from calipers.kernels.threads import num_threads
from calipers.numerics.formats import Format
from calipers.numerics.scales import Window, halvable_from, magnitudes_of, storable_scales

_MOST_SWEPT = 1 << 18  # values of a piece
_MOST_SORTED = 1 << 25  # scales at which codes of one piece change, in torch
_POLISHED = 4  # candidates of a piece that are moved to where their codes err least

__all__ = ["Optimum", "best_scales"]


@torch.no_grad()
def best_scales(
    pieces: Tensor,
    min_vals: Tensor,
    max_vals: Tensor,
    fmt: Format,
    *,
    windows: Sequence[Window],
    storable: Tensor | None,
    norm: float = 2.0,
    weights: Tensor | None = None,
    keep: int = 1,
    most: float = torch.inf,
) -> Optimum:
    """Find for each piece the scale and the window with the least Σ w·|q−x|^norm.

    ``pieces`` has shape (observations, *qparam_shape, rows, columns), ``min_vals`` and
    ``max_vals`` are its extrema, ``weights``, not negative, broadcasts with it. ``storable`` are
    the scales to choose from, ascending; ``None`` stands for every float, and asks for norm 2;
    with a window per zero point, or in pieces of more than 2¹⁸ values, scales of 8 significant bits
    are tried then, and the best ones moved to where their codes err least, until those stay.
    NaN and Inf count as zero, which quantizes without error. No scale is taken under which a value
    becomes one beyond ``most``.

    >>> from calipers.numerics.formats import Integers
    >>> from calipers.numerics.scales import windows_of
    >>> fmt = Format(Integers(2))
    >>> x = torch.tensor([[[[-2.0, 1.0, 0.9]]]])
    >>> low, high = x.amin((0, 2, 3)), x.amax((0, 2, 3))
    >>> found = best_scales(x, low, high, fmt, windows=windows_of(fmt), storable=None)
    >>> round(found.scales.item(), 4), round(found.errors.item(), 4)
    (0.9833, 0.0083)
    """
    if storable is None and norm != 2:
        raise ValueError("Only squared errors can be minimized over every float.")
    if weights is None and are_worth_counting(pieces):
        values, counts = distinct_values(pieces)
        pieces = values.expand(1, *pieces.shape[1:-2], 1, -1)
        weights = counts.unsqueeze(-2)
    if weights is not None:
        weights = weights.to(pieces.device, torch.promote_types(pieces.dtype, torch.float32))
        weights = weights.expand(pieces.shape)
    shape = min_vals.shape
    # Zero is in every range.
    low, high = min_vals.reshape(-1).clamp(max=0), max_vals.reshape(-1).clamp(min=0)
    search = ScaleSearch(pieces, low, high, fmt, windows, storable, norm, weights, keep, most)
    if storable is None and not _can_be_swept(search):
        eight_bits = storable_scales(fmt, torch.bfloat16)
        more = search._replace(storable=eight_bits, keep=max(keep, _POLISHED))
        found = Optimum(*(part[:, :keep] for part in polished(more, _search(more))))
    else:
        found = _search(search)
    return Optimum(*(part.reshape(*shape, keep) for part in found))


def _can_be_swept(search: ScaleSearch) -> bool:
    length = length_of(search.pieces)
    codes = length * len(magnitudes_of(search.fmt))
    if codes > _MOST_SORTED and _kernels_for(search) is None:
        return False
    return len(search.windows) <= 2 and length <= _MOST_SWEPT


def _kernels_for(search: ScaleSearch) -> NativeKernels | None:
    """Return the native kernels; a sweep is told all numbers of a format, and needs no row."""
    fmt = None if search.storable is None else search.fmt
    return native_for(search.pieces, fmt, search.norm)


def _search(search: ScaleSearch) -> Optimum:
    kernels = _kernels_for(search)
    if kernels is None:
        return optimum_in_torch(search)
    found = _natively(kernels, search)
    # A value becomes at most twice as large.
    may_overflow = torch.maximum(-search.low, search.high).double() > search.most / 2
    return _without_overflow(search, found) if bool(may_overflow.any()) else found


def _natively(kernels: NativeKernels, search: ScaleSearch) -> Optimum:
    values = as_grid(search.pieces, ordered=True)
    weights = None if search.weights is None else as_grid(search.weights, ordered=True)
    low, high = (bound.float().contiguous() for bound in (search.low, search.high))
    windows = torch.tensor(search.windows, dtype=torch.float32, device="cpu")
    found = Optimum(
        low.new_empty(len(low), search.keep),
        low.new_empty(len(low), search.keep, dtype=torch.int32),
        low.new_empty(len(low), search.keep, dtype=torch.float64),
    )
    given, threads = (values, weights, low, high), num_threads()
    if search.storable is None:
        kernels.sweep(*given, windows, magnitudes_of(search.fmt), *found, threads)
        return found
    storable = search.storable.float().contiguous()
    table = storable, halvable_from(storable)
    shifted = any(window.zero for window in search.windows)
    numbers = search.fmt.grid.native_name, search.norm, search.most
    kernels.optimum(*given, *table, windows, shifted, *numbers, *found, threads)
    return found


def _without_overflow(search: ScaleSearch, found: Optimum) -> Optimum:
    """Search the few pieces again whose values become too large.

    A sweep is not told of that, and other searches do not go by how ties are rounded.
    """
    ends = torch.tensor(search.windows, device=found.scales.device)[found.windows.long()]
    zero, lowest, highest = ends[..., :3].unbind(-1)
    again = overflows(search, found.scales, zero, lowest, highest).any(1).nonzero().squeeze(1)
    if not len(again):
        return found
    pieces, weights = (
        None if part is None else by_piece(part)[again][None, :, None]
        for part in (search.pieces, search.weights)
    )
    assert pieces is not None
    few = search._replace(
        pieces=pieces, weights=weights, low=search.low[again], high=search.high[again]
    )
    return Optimum(
        *(
            old.index_copy(0, again, new)
            for old, new in zip(found, optimum_in_torch(few), strict=True)
        )
    )
