"""From the counts of all values that were seen to a range, or to a scale: one piece at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.numerics.qparams import qparams_of
from calipers.solvers.entropy import entropy_range
from calipers.solvers.exact import exact
from calipers.solvers.percentile import bfloat16_upper_edge, percentile_range
from calipers.solvers.problem import Problem
from calipers.statistics.value_counts import Distribution


class Counted(NamedTuple):
    """What is known of the values of a tensor.

    :param distributions: how often each value of each piece occurred, in the order of the qparams
    :param low: the exact least value of each piece
    :param high: the exact largest value of each piece
    """

    distributions: Iterable[Distribution]
    low: Tensor
    high: Tensor
    args: QuantizationArgs


def least_error(
    seen: Counted, norm: float = 2.0, where: str = "least_error"
) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point with the least Σ|q−x|^norm over all values that were seen.

    A piece without any value gets those of its range; one of which none can be made is refused.
    """
    scale, zero_point = qparams_of(seen.low, seen.high, seen.args, None, where)
    shape = scale.shape
    scale, zero_point = scale.flatten(), zero_point.flatten()
    lows, highs = seen.low.flatten(), seen.high.flatten()
    for piece, values in enumerate(seen.distributions):
        if len(values.values):
            ends = lows[piece], highs[piece]
            best = exact(Problem.of_counts(values, *ends, seen.args, norm))
            scale[piece], zero_point[piece] = best.scale, best.zero_point
    return scale.reshape(shape), zero_point.reshape(shape)


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
