"""Scales of a weight that is rounded already, moved to where its codes lose least.

With its codes kept, the loss Δᵀ H Δ is a parabola in each scale, whose lowest point is known. A
scale moves there, as near as a checkpoint can store, where that lowers the loss.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.feedback import LEAST_GAIN, Rounding

_BLOCK = 128  # columns at least whose slopes are worked out together
_COARSE = 1 << 10  # fewer storable scales than this are far apart


class Scales(NamedTuple):
    """Which scales there can be.

    :param storable: all positive ones, ascending; None: any
    :param rows: how many rows of the weight share one
    """

    storable: Tensor | None
    rows: int

    @property
    def turns(self) -> int:
        """How often scales move, and then values: where scales are far apart, once is too little.

        Measured: three turns lower what a model loses in NVFP4 by 8 %, and change nothing in int4.
        """
        is_coarse = self.storable is not None and len(self.storable) < _COARSE
        return 3 if is_coarse else 1

    def nearest(self, wanted: Tensor) -> Tensor:
        """Return the nearest ones, with the sign of what is wanted."""
        if self.storable is None:
            return wanted
        storable = self.storable.to(wanted)
        size = wanted.abs()
        above = torch.searchsorted(storable, size).clamp(1, len(storable) - 1)
        low, high = storable[above - 1], storable[above]
        return torch.where(size - low < high - size, low, high) * wanted.sign()

    def shared(self, value: Tensor) -> Tensor:
        """Add up what the rows that share a scale have, and give each of them the sum."""
        if self.rows == 1:
            return value
        which = torch.arange(len(value), device=value.device) // self.rows
        sums = value.new_zeros(int(which[-1]) + 1).index_add_(0, which, value)
        return sums[which]


@torch.no_grad()
def refit_scales(
    values: Tensor, pulls: Tensor, hessian: Tensor, rounding: Rounding, scales: Scales
) -> tuple[Tensor, Rounding]:
    """Move one scale after the other; return the values under them, and how they are rounded.

    :param values: what a weight was rounded to, (rows, columns)
    :param pulls: the product of what they differ by and the Hessian; changed in place to what it
        becomes
    :param hessian: symmetric, (columns, columns)
    :param rounding: by which ``values`` were rounded; columns of a group stand together
    """
    values = values.clone()
    found = rounding.scales.expand(len(values), -1).clone()
    for block in _blocks(rounding.groups):
        columns = slice(block[0].start, block[-1].stop)
        before, near = values[:, columns].clone(), pulls[:, columns].clone()
        for own in block:
            group = int(rounding.groups[own.start])
            here = slice(own.start - columns.start, own.stop - columns.start)
            codes = _codes(before[:, here], rounding, group, found[:, group])
            moved = _moved(found[:, group], codes, near[:, here], hessian[own, own], scales)
            kept = (moved == found[:, group])[:, None]
            values[:, own] = torch.where(kept, before[:, here], codes * moved[:, None])
            found[:, group] = moved
            near += (values[:, own] - before[:, here]) @ hessian[own, columns]
        pulls.addmm_(values[:, columns] - before, hessian[columns])
    return values, rounding._replace(scales=found[: len(rounding.scales)])


def _blocks(groups: Tensor) -> list[list[slice]]:
    """Return the columns of each group, some groups at a time."""
    widths = torch.unique_consecutive(groups, return_counts=True)[1].tolist()
    stops = list(accumulate(widths))
    columns = [slice(stop - width, stop) for stop, width in zip(stops, widths, strict=True)]
    count = max(1, _BLOCK // max(widths, default=1))
    return [columns[start : start + count] for start in range(0, len(columns), count)]


def _codes(values: Tensor, rounding: Rounding, group: int, scales: Tensor) -> Tensor:
    """Return what is multiplied by the scales of a group."""
    codes = values / scales[:, None]
    if rounding.zeros is None:
        return rounding.fmt.round_(codes)
    zeros = rounding.zeros[:, group, None]
    return rounding.fmt.round_(codes.add_(zeros)).sub_(zeros)


def _moved(now: Tensor, codes: Tensor, pulls: Tensor, hessian: Tensor, scales: Scales) -> Tensor:
    """Return what the scales of a group become, given half the slope of the loss by each value."""
    slopes = scales.shared((pulls * codes).sum(1))
    curves = scales.shared((codes @ hessian * codes).sum(1))
    best = scales.nearest(now - (slopes / curves).nan_to_num(0.0, 0.0, 0.0))
    steps = best - now
    gains = steps * (steps * curves + 2 * slopes) < -LEAST_GAIN * steps * steps * curves
    return torch.where(gains & (best * now > 0), best, now)
