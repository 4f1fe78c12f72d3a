"""Statistics of one tensor that are updated together, by one pass over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from calipers.kernels.reductions import ChannelSummary, count_values, summarize_channels
from calipers.statistics.base import Statistic, TensorSummary, guarded

MOST_PENDING = 8
"""Tensors whose summaries are kept until statistics take them; one by one it would cost more."""


class TensorStatistics:
    """Statistics that are shown the same tensors, and know of them after :meth:`flush`.

    Each then keeps what its own ``update`` would have it keep, to the bit. All of them are such as
    :attr:`Statistic.takes_summaries`, and at most one counts values.

    >>> from calipers.statistics.sums import SquareSums
    >>> from calipers.statistics.value_counts import ValueCounts
    >>> sums, counts = SquareSums(), ValueCounts()
    >>> both = TensorStatistics([sums, counts])
    >>> both.update(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    >>> both.flush()
    >>> sums._imatrix_sum.tolist(), counts.num_tokens
    ([10.0, 4.0], 2)
    """

    takes_pairs = False
    measures_roundings: ClassVar[bool] = True

    def __init__(self, statistics: Sequence[Statistic]) -> None:
        self.statistics = tuple(statistics)
        self.lock = statistics[0].lock
        for statistic in statistics[1:]:
            statistic.share_lock(self.lock)
        self._pending: list[ChannelSummary] = []
        self._tokens = 0  # of those

    def configuration(self) -> dict[str, Any]:
        """Return what two of them have in common that measure the same of a tensor."""
        return {"statistics": [each.configuration() for each in self.statistics]}

    def origin(self) -> tuple[tuple[int, ...], ...]:
        """Return what two groups have in common that know the same by :meth:`copy_from`."""
        return tuple(each.origin() for each in self.statistics)

    def label(self) -> str:
        """Return how messages call them."""
        return self.statistics[0].label()

    def counterpart(self, statistic: Statistic, other: Self) -> Statistic:
        """Return what is in the place of a statistic in another group of the same configuration."""
        other.flush()
        return other.statistics[self.statistics.index(statistic)]

    def copy_from(self, other: Self) -> None:
        """Know what others of the same configuration know, in place of what is here."""
        other.flush()
        self._forget_pending()
        for mine, theirs in zip(self.statistics, other.statistics, strict=True):
            mine.copy_from(theirs)

    @guarded
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in a tensor, in the shape it has in the model; ``mask`` says which tokens count."""
        summary = self._summarized(x, mask)
        if summary is None:
            self.flush()
            for statistic in self.statistics:
                statistic.update(x, mask)
            return
        self._pending.append(summary)
        if len(self._pending) == MOST_PENDING:
            self.flush()

    @guarded
    def flush(self) -> None:
        """Let the statistics take what is pending."""
        if self._pending:
            summary = TensorSummary(self._tokens, self._pending)
            self._forget_pending()
            for statistic in self.statistics:
                statistic.take(summary)

    def _forget_pending(self) -> None:
        self._pending, self._tokens = [], 0

    def _summarized(self, x: Tensor, mask: Tensor | None) -> ChannelSummary | None:
        """Look at a tensor, and have its values counted; None if statistics must do so themselves.

        That is where not all is finite, nothing counts, or it takes more than one look to say so.
        """
        if not (x.numel() and x.ndim and x.is_floating_point() and x.dtype.itemsize > 1):
            return None
        # It must have the channels of those that are pending, and be where they were.
        like = self._pending[0].square_sums if self._pending else None
        if like is not None and (like.shape != x.shape[-1:] or like.device != x.device):
            return None
        number = x.numel() // x.shape[-1]
        if mask is not None:
            if mask.dtype != torch.bool or mask.device != x.device or mask.shape != x.shape[:-1]:
                return None
            number = int(mask.sum())
        if not number:
            return None
        tokens = x.detach().reshape(-1, x.shape[-1])
        marks = None if mask is None else mask.reshape(-1)
        tables = (each.table_for(tokens) for each in self.statistics)
        counts = next((table for table in tables if table is not None), None)
        summary = summarize_channels(tokens, marks, counts=counts)
        if summary is not None:
            self._tokens += number
        elif counts is not None:
            kept = tokens if marks is None else tokens[marks]
            counts -= count_values(kept[:, None, None])
        return summary
