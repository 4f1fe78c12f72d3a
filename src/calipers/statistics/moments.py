"""How strong a stream is: Σx² of each channel, or of whole tokens, and the number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from calipers.errors import not_finite
from calipers.kernels.moments import sum_of_squares
from calipers.numerics.tensors import checked_mask
from calipers.statistics.base import Reduction, Statistic
from calipers.statistics.locking import full_precision
from calipers.statistics.summary import TensorSummary
from calipers.statistics.value_counts import ValueCounts

NonFinite = Literal["raise", "ignore", "keep"]


class TokenSums(Statistic):
    """Sums over the tokens of a stream, and their number: the fields of a subclass, in this order.

    :param nonfinite: NaN and Inf are an error, and nothing is recorded (``raise``); the tokens that
        have any are left out (``ignore``); or they are summed up as they are (``keep``)
    """

    def __init__(self, *, nonfinite: NonFinite = "raise") -> None:
        self.nonfinite: NonFinite = nonfinite

    def configuration(self) -> dict[str, Any]:
        """Return what two statistics have in common that measure the same of a tensor."""
        return {**super().configuration(), "nonfinite": self.nonfinite}

    @property
    def num_tokens(self) -> int:
        """How many tokens were taken in."""
        return int(getattr(self, list(self.declared())[-1], 0))

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
        summed = self._summed(tokens, marks)
        if self.nonfinite == "raise" and not bool(torch.isfinite(self._witness(*summed)).all()):
            self._refuse(tokens, marks, x)
        self.absorb(**dict(zip(self.declared(), summed, strict=True)))

    def _summed(self, tokens: Tensor, marks: Tensor | None) -> tuple[Tensor, ...]:
        """Return the sums over the tokens that are marked, (tokens, channels), and their number."""
        raise NotImplementedError

    def _witness(self, *sums: Tensor) -> Tensor:
        """Return numbers that are finite only if all values are."""
        return sums[0]

    def _refuse(self, tokens: Tensor, marks: Tensor | None, x: Tensor) -> None:
        """Raise if a value is not finite, and not only a sum of such as are."""
        kept = tokens if marks is None else tokens[marks]
        count = int((~torch.isfinite(kept)).sum())
        if count:
            raise not_finite(self.label(), count, x.numel(), x.shape)


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
    _imatrix_sum: Tensor
    _imatrix_count: Tensor

    def problem_with(self, fields: Mapping[str, Tensor]) -> str | None:
        """Say why it cannot have these fields, which are sound each, if it cannot."""
        return problem_with_channels("_imatrix_sum", fields["_imatrix_sum"])

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

    def _summed(self, tokens: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor]:
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
    measures_roundings = False
    square_sum: Tensor
    square_count: Tensor

    def __init__(self, *, nonfinite: NonFinite = "keep") -> None:
        super().__init__(nonfinite=nonfinite)

    def derive_from(self, known: Iterable[Statistic]) -> bool:
        """Take the sum from the counts of all values, too."""
        known = list(known)
        if super().derive_from(known):
            return True
        counts = next((each for each in known if isinstance(each, ValueCounts)), None)
        if counts is None or not counts.num_tokens:
            return False
        total, tokens = counts.square_sum().reshape(1), torch.tensor(counts.num_tokens)
        self.load_fields({"square_sum": total, "square_count": tokens})
        return True

    def _summed(self, tokens: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor]:
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
