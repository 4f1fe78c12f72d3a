"""Sums over the tokens of a stream: Σx² of channels or tokens, Σ x xᵀ, squared gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from calipers.errors import not_finite
from calipers.kernels.reductions import sum_of_products, sum_of_squares
from calipers.numerics.tensors import checked_mask
from calipers.statistics.base import Form, Load, Reduction, Statistic, TensorSummary, full_precision
from calipers.statistics.value_counts import ValueCounts

NonFinite = Literal["raise", "ignore", "keep"]


class TokenSums(Statistic):
    """Sums over the tokens of a stream, and their number: the fields of a subclass, in this order.

    :param nonfinite: NaN and Inf are an error, and nothing is recorded (``raise``); the tokens that
        have any are left out (``ignore``); or they are summed up as they are (``keep``)
    """

    configured_by: ClassVar[tuple[str, ...]] = ("nonfinite",)

    def __init__(self, *, nonfinite: NonFinite = "raise") -> None:
        self.nonfinite: NonFinite = nonfinite

    @full_precision()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in activations of shape (…, channels); ``mask``, shape (…), says which count."""
        if not x.shape[-1]:
            return
        marks = None if mask is None else checked_mask(mask, x, "input", x.ndim - 1).reshape(-1)
        tokens = x.detach().reshape(-1, x.shape[-1])
        if self.nonfinite == "ignore":
            finite = torch.isfinite(tokens).all(-1)
            if not bool(finite.all()):
                tokens, marks = tokens[finite], None if marks is None else marks[finite]
        summed = self.summed(tokens, marks)
        if self.nonfinite == "raise" and not bool(torch.isfinite(self.witness(*summed)).all()):
            kept = tokens if marks is None else tokens[marks]
            count = int((~torch.isfinite(kept)).sum())
            if count:  # and not only a sum of finite values that overflows
                raise not_finite(self.label(), count, x.numel(), x.shape)
        self.absorb(**dict(zip(self.declared(), summed, strict=True)))

    def summed(self, tokens: Tensor, marks: Tensor | None) -> tuple[Tensor, ...]:
        """Return the sums over the tokens that are marked, (tokens, channels), and their number."""
        raise NotImplementedError

    def witness(self, *sums: Tensor) -> Tensor:
        """Return numbers that are finite only if all values are."""
        return sums[0]


class SquareSums(TokenSums):
    """Sums x² of each channel in float64, so that the order of the data hardly rounds.

    >>> sums = SquareSums()
    >>> sums.update(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    >>> sums._imatrix_sum.tolist(), sums.num_tokens
    ([10.0, 4.0], 2)
    >>> sums.update(torch.tensor([[1.0, 1.0], [9.0, 9.0]]), torch.tensor([True, False]))
    >>> sums._imatrix_sum.tolist(), sums.num_tokens
    ([11.0, 5.0], 3)
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "_imatrix_sum": Reduction.SUM,
        "_imatrix_count": Reduction.SUM,
    }
    tokens_field = "_imatrix_count"
    forms: ClassVar[Mapping[str, Form]] = {"_imatrix_sum": Form.SUM}
    _imatrix_sum: Tensor
    _imatrix_count: Tensor

    def problem_with(self, fields: Mapping[str, Tensor]) -> str | None:
        """Say why it cannot have these fields, which are sound each, if it cannot."""
        return problem_with_channels("_imatrix_sum", fields["_imatrix_sum"])

    @property
    def can_be_divided(self) -> bool:
        """Whether it is known what it would be had each channel been divided by a factor."""
        return True

    def divided_by(self, factors: Tensor) -> Self:
        """Return the sums had each channel been divided by a factor: Σ(x/f)² = Σx² / f²."""
        fields = self.fields()
        if fields:
            sums = fields["_imatrix_sum"]
            fields["_imatrix_sum"] = sums / factors.to(sums) ** 2
        return self.with_fields(fields)

    @property
    def takes_summaries(self) -> bool:
        """Whether summaries of finite tensors, made for several statistics, are enough for it."""
        return True

    def take(self, summary: TensorSummary) -> None:
        """Take in the tensors of a summary, as ``update`` would, one after the other."""
        first, *others = summary.square_sums
        self.absorb(_imatrix_sum=first, _imatrix_count=summary.tokens)
        for sums in others:
            self.absorb(_imatrix_sum=sums)

    def summed(self, tokens: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sums over the tokens that are marked, and their number."""
        return sum_of_squares(tokens, marks), number_of(tokens, marks)


class TokenSquares(TokenSums):
    """Sums ‖x‖² of whole tokens; several times faster than by channel. NaN and Inf are kept.

    Roundings of single values cancel in such a sum.

    >>> sums = TokenSquares()
    >>> sums.update(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    >>> float(sums.square_sum), sums.num_tokens
    (29.0, 2)
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "square_sum": Reduction.SUM,
        "square_count": Reduction.SUM,
    }
    tokens_field = "square_count"
    measures_roundings = False
    square_sum: Tensor
    square_count: Tensor

    def __init__(self, *, nonfinite: NonFinite = "keep") -> None:
        super().__init__(nonfinite=nonfinite)

    def derive_from(self, known: Collection[Statistic]) -> bool:
        """Take the sum from the counts of all values, too."""
        if super().derive_from(known):
            return True
        counts = next((each for each in known if isinstance(each, ValueCounts)), None)
        if counts is None or not counts.num_tokens:
            return False
        total, tokens = counts.square_sum().reshape(1), torch.tensor(counts.num_tokens)
        self.load_fields({"square_sum": total, "square_count": tokens})
        return True

    def summed(self, tokens: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sums over the tokens that are marked, and their number."""
        working = torch.promote_types(tokens.dtype, torch.float32)
        norms = torch.linalg.vector_norm(tokens, dim=-1, dtype=working)
        norms = norms if marks is None else norms[marks]
        return norms.double().square().sum().reshape(1), number_of(tokens, marks)


def number_of(tokens: Tensor, marks: Tensor | None) -> Tensor:
    """Return how many tokens are marked."""
    return torch.tensor(len(tokens), device=tokens.device) if marks is None else marks.sum()


def problem_with_channels(name: str, sums: Tensor) -> str | None:
    """Say why a field cannot be sums of squares by channel, if it cannot."""
    if sums.ndim != 1 or bool((sums < 0).any()):
        return f"{name} must be one number for each channel, not below zero"
    return None


WIDEST = 512


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


class HessianSums(TokenSums):
    """Sums of products of channels."""

    tokens_field = "_hessian_count"
    forms: ClassVar[Mapping[str, Form]] = {"_hessian_sum": Form.SUM}
    _hessian_sum: Tensor
    _hessian_count: Tensor

    @property
    def hessians(self) -> Tensor:
        """Σ x xᵀ of each block, (blocks, width, width); only where there are tokens."""
        return self._hessian_sum

    @property
    def crosses(self) -> Tensor | None:
        """Σ of the stream as it was times as it has become; None where there is one stream."""
        return None

    @property
    def residuals(self) -> Tensor | None:
        """Σ of the change of that to which outputs are added; None where nothing is known of it."""
        return None


class BlockHessians(HessianSums):
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

    configured_by = ("nonfinite", "width")

    def __init__(self, width: int | None = None, *, nonfinite: NonFinite = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self._width = width

    @property
    def width(self) -> int | None:
        """How many channels a block has: of those that are summed, or of those that will be."""
        if self._width is not None or "_hessian_count" not in self.fields_to_share():
            return self._width
        return self._hessian_sum.shape[-1]

    def problem_with(self, fields: Mapping[str, Tensor]) -> str | None:
        """Say why it cannot have these fields, which are sound each, if it cannot."""
        sums, width = fields["_hessian_sum"], self.width
        if sums.ndim != 3 or sums.shape[1:] != (width, width):
            return f"_hessian_sum must be of shape (blocks, {width}, {width})"
        return None

    def expected_bytes(self, channels: int, heads: int = 1) -> int:  # noqa: ARG002
        """Estimate the memory it takes for a tensor of so many channels."""
        return 8 * channels * (self._width or channels)

    @property
    def can_be_divided(self) -> bool:
        """Whether it is known what it would be had each channel been divided by a factor."""
        return True

    def divided_by(self, factors: Tensor) -> Self:
        """Return the sums had each channel been divided by a factor: D⁻¹ Σ x xᵀ D⁻¹."""
        fields = self.fields()
        if fields:
            sums = fields["_hessian_sum"]
            blocks = factors.to(sums).reshape(len(sums), -1)
            fields["_hessian_sum"] = sums / blocks[:, :, None] / blocks[:, None, :]
        return self.with_fields(fields)

    def derive_from(self, known: Collection[Statistic]) -> bool:
        """Take the blocks on the diagonal of wider ones, too."""
        if super().derive_from(known):
            return True
        for each in known:
            if (
                isinstance(each, BlockHessians)
                and each.num_tokens
                and self._width is not None
                and (each.width or 1) % self._width == 0
            ):
                load = partial(_on_diagonal, each.loader("_hessian_sum"), self._width)
                self.replace_fields({"_hessian_count": each._hessian_count}, {"_hessian_sum": load})
                return True
        return False

    def summed(self, tokens: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sums over the tokens that are marked, and their number."""
        width = self.width
        assert width is not None, "the width of blocks is not known"
        tokens = tokens if marks is None else tokens[marks]
        blocks = torch.split(tokens, width, dim=1)
        sums = [sum_of_products(block)[None] for block in blocks]
        total = sums[0] if len(sums) == 1 else torch.cat(sums)
        return total, torch.tensor(len(tokens), device=tokens.device)

    def witness(self, *sums: Tensor) -> Tensor:
        """Return numbers that are finite only if all values are."""
        return sums[0].diagonal(dim1=-2, dim2=-1)


class PairedHessians(HessianSums):
    """Sums y yᵀ and x yᵀ of two streams through one module, and counts tokens.

    A tensor holds both side by side, (…, 2 × channels): x as it was in the model, then y as it has
    become, when what came before was quantized. Behind them may stand by how much that has changed
    to which the output is added, d: then d yᵀ is summed as well.

    >>> sums = PairedHessians(channels=2)
    >>> sums.update(torch.tensor([[1.0, 2.0, 3.0, 0.0]]))
    >>> sums._hessian_sum.tolist(), sums._cross_sum.tolist()
    ([[[9.0, 0.0], [0.0, 0.0]]], [[[3.0, 0.0], [6.0, 0.0]]])
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "_hessian_sum": Reduction.SUM,
        "_cross_sum": Reduction.SUM,
        "_residual_sum": Reduction.SUM,
        "_hessian_count": Reduction.SUM,
    }
    _cross_sum: Tensor
    _residual_sum: Tensor
    takes_pairs = True
    configured_by = ("nonfinite", "channels")

    def __init__(self, channels: int, *, nonfinite: NonFinite = "raise") -> None:
        super().__init__(nonfinite=nonfinite)
        self.channels = channels

    @property
    def crosses(self) -> Tensor | None:
        """Σ x yᵀ."""
        return self._cross_sum

    @property
    def residuals(self) -> Tensor | None:
        """Σ d yᵀ."""
        return self._residual_sum if self._residual_sum.numel() else None

    def expected_bytes(self, channels: int, heads: int = 1) -> int:  # noqa: ARG002
        """Estimate the memory it takes for a tensor of so many channels."""
        return len(self.reductions) * 8 * channels**2

    def summed(self, tokens: Tensor, marks: Tensor | None) -> tuple[Tensor, ...]:
        """Return the sums over the tokens that are marked, and their number."""
        tokens = tokens if marks is None else tokens[marks]
        rest = tokens.shape[-1] - 2 * self.channels
        before, now, change = torch.split(tokens, [self.channels, self.channels, rest], dim=-1)
        hessian = sum_of_products(now)
        crosses = (sum_of_products(each, now)[None] for each in (before, change))
        return hessian[None], *crosses, torch.tensor(len(tokens), device=tokens.device)

    def witness(self, *sums: Tensor) -> Tensor:
        """Return numbers that are finite only if all values are."""
        crosses = sums[1][..., 0], sums[2][..., 0]
        return torch.cat([sums[0].diagonal(dim1=-2, dim2=-1), *crosses], -1)


def _on_diagonal(load: Load, width: int) -> Tensor:
    """Return the narrower blocks on the diagonals of wide ones, which are loaded.

    >>> _on_diagonal(lambda: torch.arange(16.0).view(1, 4, 4), 2).tolist()
    [[[0.0, 1.0], [4.0, 5.0]], [[10.0, 11.0], [14.0, 15.0]]]
    """
    blocks = load()
    count, wide = blocks.shape[0], blocks.shape[1] // width
    cut = blocks.reshape(count, wide, width, wide, width)
    return cut.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2).reshape(-1, width, width)


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


_AT_ONCE = 1 << 22
"""Numbers of a gradient that are in memory at a time."""


class Sensitivity(Statistic):
    """Sums, over sequences, the squared gradients of a weight, all rows of a column together.

    Gradients are those of the loss on words that the model itself would say. Then E[(∂L/∂w)²] is
    how fast the loss grows with (Δw)², and half of Σ E[(∂L/∂w)²]·(Δw)² predicts what errors of the
    weight cost (Fisher information). Rows count alike: what is kept of them is their mean.

    >>> seen = Sensitivity()
    >>> seen.add(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), tokens=4)
    >>> seen.add(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), tokens=4)
    >>> seen.per_token().tolist()
    [1.25, 0.5]
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "_sensitivity_sum": Reduction.SUM,
        "_sensitivity_count": Reduction.SUM,
    }
    tokens_field = "_sensitivity_count"
    forms: ClassVar[Mapping[str, Form]] = {"_sensitivity_sum": Form.SUM}
    _sensitivity_sum: Tensor
    _sensitivity_count: Tensor

    def add(self, gradient: Tensor, tokens: int) -> None:
        """Take in the gradient of the summed loss of so many tokens, in the shape of the weight."""
        self._add(sum_of_squares(gradient) / len(gradient), tokens)

    def add_product(self, outputs: Tensor, inputs: Tensor, tokens: int) -> None:
        """Take in the gradient outputsᵀ inputs, of which a part is in memory at a time.

        :param outputs: the gradients of the outputs of the module, (positions, rows)
        :param inputs: what came in, (positions, columns)
        """
        width = max(1, _AT_ONCE // inputs.shape[-1])
        parts = (sum_of_squares(some.T @ inputs) for some in torch.split(outputs, width, dim=1))
        squares = sum(parts, inputs.new_zeros(inputs.shape[-1], dtype=torch.float64))
        self._add(squares / outputs.shape[-1], tokens)

    def _add(self, squares: Tensor, tokens: int) -> None:
        self.absorb(_sensitivity_sum=squares, _sensitivity_count=torch.tensor(tokens))

    def problem_with(self, fields: Mapping[str, Tensor]) -> str | None:
        """Say why it cannot have these fields, which are sound each, if it cannot."""
        return problem_with_channels("_sensitivity_sum", fields["_sensitivity_sum"])

    @property
    def can_be_divided(self) -> bool:
        """Whether it is known what it would be had each channel been divided by a factor."""
        return True

    def divided_by(self, factors: Tensor) -> Self:
        """Return the sums had input channels been divided by factors, and columns multiplied.

        The gradient of a column that is f times as large is 1/f of what it was.
        """
        fields = self.fields()
        if fields:
            sums = fields["_sensitivity_sum"]
            fields["_sensitivity_sum"] = sums / factors.to(sums) ** 2
        return self.with_fields(fields)

    def per_token(self) -> Tensor:
        """Return E[(∂L/∂w)²] of each column, for the loss of one token."""
        return self._sensitivity_sum / self.num_tokens
