"""The scale of the scales (NVFP4): one for all weights that run as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from calipers.solvers.exact import Solutions

_FACTORS = (0.875, 0.75, 0.625)


def common_global_scale(weights: Sequence[Solutions], usual: Tensor) -> Tensor:
    """Choose among a few by how well a sample of all weights can be quantized.

    :param usual: the one that min-max takes, and the first candidate
    """
    candidates = [usual, *(usual * factor for factor in _FACTORS)]
    errors = [_total(weights, Solutions.sampled_error, scale) for scale in candidates]
    best = candidates[min(range(len(errors)), key=errors.__getitem__)]
    if best is usual:
        return usual
    # A sample may mislead; under the usual one nothing errs more than with min-max.
    chosen = _total(weights, Solutions.error, best)
    return best if chosen <= _total(weights, Solutions.minmax_error, usual) else usual


def _total(
    weights: Sequence[Solutions],
    error: Callable[[Solutions, Tensor], float],
    global_scale: Tensor,
) -> float:
    """Sum an error exactly: whoever asks, in whatever order, comes to the same choice."""
    return math.fsum(each.once(error, global_scale) for each in weights)
