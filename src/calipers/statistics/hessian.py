"""How the inputs of a layer go together: E[x xᵀ] of neighbouring channels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from calipers.statistics.base import Reduction
from calipers.statistics.moments import NonFinite, TokenSums

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


class BlockHessians(TokenSums):
    """Sums x xᵀ of each block of channels, and counts tokens. Sums are kept in float64.

    :param width: channels of a block; None for that of sums which are loaded or taken over

    >>> sums = BlockHessians(width=2)
    >>> sums.update(torch.tensor([[1.0, 2.0, 3.0, 0.0]]))
    >>> sums._hessian_sum.tolist(), sums.num_tokens
    ([[[1.0, 2.0], [2.0, 4.0]], [[9.0, 0.0], [0.0, 0.0]]], 1)
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "_hessian_sum": Reduction.SUM,
        "_hessian_count": Reduction.SUM,
    }
    _hessian_sum: Tensor
    _hessian_count: Tensor

    def __init__(self, width: int | None = None, *, nonfinite: NonFinite = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self._width = width

    @property
    def width(self) -> int | None:
        """How many channels a block has: of those that are summed, or of those that will be."""
        held = self.fields().get("_hessian_sum")
        return self._width if held is None else held.shape[-1]

    def configuration(self) -> dict[str, Any]:
        """Return what two statistics have in common that measure the same of a tensor."""
        return {**super().configuration(), "width": self.width}

    def _summed(self, tokens: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor]:
        width, channels = self.width, tokens.shape[-1]
        assert width is not None, "the width of blocks is not known"
        tokens = tokens if marks is None else tokens[marks]
        total = torch.zeros(
            channels // width, width, width, dtype=torch.float64, device=tokens.device
        )
        working = torch.promote_types(tokens.dtype, torch.float32)
        for part in torch.split(tokens, _TOKENS):
            blocks = part.to(working).reshape(len(part), len(total), width).transpose(0, 1)
            total += torch.bmm(blocks.transpose(1, 2), blocks)
        return total, torch.tensor(len(tokens), device=tokens.device)

    def _squares(self, total: Tensor) -> Tensor:
        return total.diagonal(dim1=-2, dim2=-1)


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
