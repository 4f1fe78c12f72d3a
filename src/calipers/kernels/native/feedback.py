"""Error feedback and descent, natively."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from calipers.kernels.feedback import LEAST_GAIN, Rounding, descend_in_place, feed_back_block
from calipers.kernels.native import BACKEND, library, numbers_of
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
        adjusted=adjusted,
        target=target,
        factor=factor,
        rounder=_rounder(rounding),
        begin=columns.start,
        result=result,
        errors=errors,
        threads=num_threads(),
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
    count: int = library().descend(
        values=values,
        pulls=known,
        hessian=hessian,
        rounder=_rounder(rounding),
        sweeps=sweeps,
        block=block,
        least_gain=LEAST_GAIN,
        threads=num_threads(),
    )
    if pulls is not None and known is not pulls:
        pulls.copy_(known)
    return count


def _rounder(rounding: Rounding) -> Any:
    scales, zeros, groups, fmt = rounding
    return library().Rounder(
        scales=scales, zeros=zeros, groups=groups, numbers=numbers_of(fmt.grid)
    )
