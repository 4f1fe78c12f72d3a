"""The best of all scales that can be stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from calipers.kernels.counts import are_worth_counting, distinct_values
from calipers.kernels.operations import Workload, operation
from calipers.kernels.optimum_in_torch import optimum_in_torch
from calipers.kernels.pieces import length_of
from calipers.kernels.polishing import polished
from calipers.kernels.scale_search import Optimum, ScaleSearch
from calipers.numerics.formats import Format
from calipers.numerics.scales import Window, magnitudes_of, storable_scales

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
    if storable is not None:
        found = try_scales(search)
    elif len(windows) <= 2 and length_of(pieces) <= _MOST_SWEPT:
        found = sweep_scales(search)
    else:
        found = _polished(search)
    return Optimum(*(part.reshape(*shape, keep) for part in found))


@operation(lambda search: Workload((search.pieces,), search.fmt, search.norm))
def try_scales(search: ScaleSearch) -> Optimum:
    """Return the best of the scales that can be stored."""
    return optimum_in_torch(search)


# Numbers of the format are given to a sweep as values, so that a backend need not know the format.
@operation(lambda search: Workload((search.pieces,)))
def sweep_scales(search: ScaleSearch) -> Optimum:
    """Return the best of all floats, by squared errors."""
    if length_of(search.pieces) * len(magnitudes_of(search.fmt)) > _MOST_SORTED:
        return _polished(search)
    return optimum_in_torch(search)


def _polished(search: ScaleSearch) -> Optimum:
    """Try scales of 8 significant bits, and move the best ones to where their codes err least."""
    eight_bits = storable_scales(search.fmt, torch.bfloat16)
    more = search._replace(storable=eight_bits, keep=max(search.keep, _POLISHED))
    return Optimum(*(part[:, : search.keep] for part in polished(more, try_scales(more))))
