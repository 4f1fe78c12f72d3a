"""Error feedback and descent, natively."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from calipers.kernels.feedback import LEAST_GAIN, Rounding, descend_in_place, feed_back_block
from calipers.kernels.native import BACKEND, library
from calipers.kernels.threads import num_threads


@feed_back_block.register(BACKEND)
def _feed_back(
    adjusted: Tensor,
    target: Tensor,
    factor: Tensor,
    rounding: Rounding,
    columns: slice,
    result: Tensor,
    errors: Tensor,
) -> None:
    library().feed_back(
        adjusted,
        target,
        factor,
        *_told(rounding),
        columns.start,
        result,
        errors,
        num_threads(),
    )


@descend_in_place.register(BACKEND)
def _descend(
    values: Tensor,
    target: Tensor,
    hessian: Tensor,
    rounding: Rounding,
    sweeps: int,
    block: int,
    pulls: Tensor | None,
) -> int:
    known = (values - target) @ hessian if pulls is None else pulls.resolve_neg().contiguous()
    told = (*_told(rounding), sweeps, block, LEAST_GAIN, num_threads())
    count = int(library().descend(values, known, hessian, *told))
    if pulls is not None and known is not pulls:
        pulls.copy_(known)
    return count


def _told(rounding: Rounding) -> tuple[Any, ...]:
    fmt = rounding.fmt
    return (rounding.scales, rounding.zeros, rounding.groups, fmt.grid.native_name, *fmt.limits)
