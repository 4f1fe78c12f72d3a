"""Error feedback and descent, natively."""

from __future__ import annotations

from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from torch.nn.functional import pad

from calipers.kernels.hessian import (
    LEAST_GAIN,
    ROUNDS,
    Descent,
    Feedback,
    Rounding,
    choose_in_blocks,
    descend_in_place,
    feed_back_block,
)
from calipers.kernels.native import BACKEND, library, numbers_of
from calipers.kernels.operations import Declined
from calipers.kernels.resources import num_threads
from calipers.numerics.formats import Format

_PANEL = 16  # columns of a matrix that lie together


@feed_back_block.register(BACKEND)
def _feed_back(feedback: Feedback, adjusted: Tensor, columns: slice) -> None:
    library().feed_back(
        adjusted=adjusted,
        target=feedback.target,
        factor=feedback.factor,
        rounder=_rounder(feedback.rounding),
        begin=columns.start,
        result=feedback.result,
        errors=feedback.errors,
        threads=num_threads(),
    )


@descend_in_place.register(BACKEND)
def _descend(descent: Descent, sweeps: int) -> int:
    values, target, hessian, rounding, block, pulls = descent
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


@choose_in_blocks.register(BACKEND)
def _choose_in_blocks(
    grid: Tensor, scales: Tensor, zeros: Tensor, hessian: Tensor, args: QuantizationArgs
) -> Tensor | Declined:
    if grid.shape[2] != 1 or hessian.shape[-1] <= grid.shape[-1]:
        return Declined("pieces of several rows, or one to a block")
    fmt = Format.of(args)
    chosen = torch.empty(grid.shape[:2], dtype=torch.int64)
    own, across = _panels(hessian, grid.shape[-1])
    library().choose_candidates(
        values=grid[None],
        scales=scales.contiguous(),
        zeros=None if fmt.symmetric else zeros.contiguous(),
        own=own,
        across=across,
        numbers=numbers_of(fmt.grid),
        rounds=ROUNDS,
        choice=chosen,
        threads=num_threads(),
    )
    return chosen


def _panels(hessian: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Cut the Hessian by pieces, and their columns into panels, filled up with zeros.

    Returns what is within pieces, as triangles that give the same form; and all that ends in one.
    """
    blocks, width, _ = hessian.shape
    places, fill = width // columns, -columns % _PANEL
    cut = hessian.reshape(blocks, places, columns, places, columns)
    own = cut.diagonal(dim1=1, dim2=3).movedim(-1, 1)
    own = (own + own.mT).triu(1) + torch.diag_embed(own.diagonal(dim1=-2, dim2=-1))
    own = pad(own, (0, fill, 0, fill))
    own = own.reshape(*own.shape[:3], -1, _PANEL).movedim(-2, 2)
    across = pad(cut, (0, fill)).reshape(*cut.shape[:4], -1, _PANEL).permute(0, 3, 4, 1, 2, 5)
    return own.contiguous(), across.contiguous()
