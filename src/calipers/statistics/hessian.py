"""How the inputs of a layer go together: E[x xᵀ] of neighbouring channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from calipers.statistics.base import Reduction, Statistic
from calipers.statistics.guarding import full_precision

WIDEST = 512
_TOKENS = 256  # multiplied in float32 at a time, and added up in float64


def block_width(columns: int, piece: int) -> int:
    """Return how wide blocks are for pieces of so many columns: as wide as possible, up to 512.

    A block holds whole pieces, whose scales are then chosen together; or, where a piece is wider
    or columns are left over, a piece holds whole blocks.

    >>> block_width(4096, 128), block_width(288, 96), block_width(768, 16)
    (512, 288, 384)
    >>> block_width(4096, 4096), block_width(288, 128)
    (512, 32)
    """
    if columns % piece or piece > WIDEST:
        common = math.gcd(columns, piece)
        return max(width for width in range(1, WIDEST + 1) if common % width == 0)
    return max(width for width in range(piece, WIDEST + 1, piece) if columns % width == 0)


class BlockHessians(Statistic):
    """Sums x xᵀ of each block of channels, and counts tokens. Sums are kept in float64.

    >>> sums = BlockHessians()
    >>> sums.absorb_outer(torch.tensor([[1.0, 2.0, 3.0, 0.0]]), width=2)
    >>> sums._hessian_sum.tolist(), int(sums._hessian_count)
    ([[[1.0, 2.0], [2.0, 4.0]], [[9.0, 0.0], [0.0, 0.0]]], 1)
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "_hessian_sum": Reduction.SUM,
        "_hessian_count": Reduction.SUM,
    }
    _hessian_sum: Tensor
    _hessian_count: Tensor

    @full_precision()
    def absorb_outer(self, x: Tensor, width: int, mask: Tensor | None = None) -> None:
        """Take in activations of shape (…, channels); ``mask``, shape (…), says which count."""
        tokens = x.detach().reshape(-1, x.shape[-1])
        if mask is not None:
            tokens = tokens[mask.reshape(-1).to(x.device, torch.bool)]
        total = torch.zeros(
            x.shape[-1] // width, width, width, dtype=torch.float64, device=x.device
        )
        working = torch.promote_types(tokens.dtype, torch.float32)
        for part in torch.split(tokens, _TOKENS):
            blocks = part.to(working).reshape(len(part), len(total), width).transpose(0, 1)
            total += torch.bmm(blocks.transpose(1, 2), blocks)
        count = torch.tensor(len(tokens), device=x.device)
        self.absorb(_hessian_sum=total, _hessian_count=count)


def shrunk(hessian: Tensor, tokens: int, damping: float = 0.01) -> Tensor:
    """Trust a Hessian as far as it has tokens: shrink it to its diagonal, and damp that.

    What lies off the diagonal keeps tokens / (tokens + width) of its weight; ``damping`` times the
    mean of the diagonal is added to the diagonal.
    """
    width = hessian.shape[-1]
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    trust = tokens / (tokens + width)
    mean = diagonal.mean(-1, keepdim=True)
    return hessian * trust + torch.diag_embed(diagonal * (1 - trust) + mean * damping)
