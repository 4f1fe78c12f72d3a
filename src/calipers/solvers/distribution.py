"""From the counts of all values that were seen to a range: one piece at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from calipers.solvers.entropy import entropy_range
from calipers.solvers.percentile import bfloat16_upper_edge, percentile_range
from calipers.solvers.problem import Counted
from calipers.statistics.value_counts import Distribution


def percentile(seen: Counted, share: float) -> tuple[Tensor, Tensor]:
    """Return the range that leaves out at most 100 − ``share`` percent of the values of a piece.

    Values that were rounded to be counted are kept by the outer edge of their bin.
    """

    def ends_of(values: Distribution, low: Tensor, _high: Tensor) -> tuple[Tensor, Tensor]:
        ends = percentile_range(*values, share, seen.args.symmetric)
        if low.dtype.itemsize == 2:
            return ends
        # float64 is rounded to float32 on its way, up to half a float32 further.
        slack = int(low.dtype == torch.float64)
        return -bfloat16_upper_edge(-ends[0], slack), bfloat16_upper_edge(ends[1], slack)

    return _piece_by_piece(seen, ends_of)


def entropy(seen: Counted, bins: int) -> tuple[Tensor, Tensor]:
    """Return the range whose quantized distribution diverges least from that of the values.

    The whole range is [−absmax, absmax] for symmetric formats, and from minimum to maximum, and to
    zero, for others.
    """

    def ends_of(values: Distribution, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        low, high = low.clamp(max=0), high.clamp(min=0)
        if seen.args.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        if low == high:
            return low, high
        return entropy_range(*values, low, high, seen.args, bins)

    return _piece_by_piece(seen, ends_of)


def _piece_by_piece(
    seen: Counted, ends_of: Callable[[Distribution, Tensor, Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Let a function find the ends of each piece, and cut them to its extrema.

    A piece without any value keeps its extrema.
    """
    low, high = seen.low, seen.high
    extrema = zip(low.flatten().cpu(), high.flatten().cpu(), strict=True)
    ends = [
        ends_of(values, *both) if len(values.values) else both
        for values, both in zip(seen.distributions, extrema, strict=True)
    ]
    lows, highs = (
        torch.stack([end.to(low) for end in side]).reshape(low.shape)
        for side in zip(*ends, strict=True)
    )
    return torch.maximum(lows, low), torch.minimum(highs, high)
