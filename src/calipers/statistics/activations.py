"""What costs are worked out from: how strong each channel of a stream is, and its values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from typing_extensions import Self

from calipers.numerics.layout import Layout, strategy_name
from calipers.statistics.base import Reduction
from calipers.statistics.guarding import guarded
from calipers.statistics.moments import SquareSums
from calipers.statistics.value_counts import ValueCounts

_WHOLE = QuantizationArgs(num_bits=8, strategy="tensor")


class ActivationStatistics(SquareSums, ValueCounts):
    """Sums squares, counts each value, or both, as it is asked to.

    :param base_name: what it sees: ``input``, ``output``, ``q``, ``k`` or ``v``
    :param squares: whether x² is summed up by channel, or over a whole token, or not at all
    :param counted: how the tensor will be quantized, if its values are to be counted

    >>> int8 = QuantizationArgs(num_bits=8)
    >>> seen = ActivationStatistics("input", squares="channel", counted=int8)
    >>> seen.take(torch.tensor([[1.0, 2.0], [3.0, 0.0]]), torch.tensor([True, False]))
    >>> seen._imatrix_sum.tolist(), [part.tolist() for part in next(seen.distributions())]
    ([1.0, 4.0], [[1.0, 2.0], [1, 1]])
    """

    reductions: ClassVar[Mapping[str, Reduction]] = {"seen_like": Reduction.SUM}
    seen_like: Tensor  # no elements, only the dtype; adding two of them promotes it

    def __init__(
        self,
        base_name: str,
        *,
        squares: Literal["channel", "token"] | None = None,
        counted: QuantizationArgs | None = None,
    ) -> None:
        self._layout = Layout.of(base_name, counted or _WHOLE)
        self._squares, self._counted = squares, counted is not None

    def configuration(self) -> dict[str, Any]:
        """Return what two statistics must have in common to be merged, or to read together."""
        return {
            **super().configuration(),
            "base_name": self._layout.base_name,
            "squares": self._squares,
            "counted": strategy_name(self._layout.args) if self._counted else None,
        }

    @property
    def has_counts(self) -> bool:
        """Whether any value was counted."""
        return "seen_like" in self.fields()

    @property
    def is_exact(self) -> bool:
        """Whether values were counted as they are, not rounded to bfloat16."""
        return self.seen_like.dtype.itemsize == 2

    @guarded
    def take(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in a tensor; ``mask`` says which of its tokens count."""
        if self._squares == "token":
            self._absorb_whole(x, mask)
        if self._squares == "channel" or self._counted:
            x = x if mask is None else self._layout.select_tokens(x, mask)
        if not x.numel():
            return
        if self._squares == "channel":
            self.absorb_tokens(x)
        if self._counted:
            self.count(self._layout.pieces(x))
            self.absorb(seen_like=x.new_empty(0))

    def _absorb_whole(self, x: Tensor, mask: Tensor | None) -> None:
        """Take in the squares of tokens; several times faster than by channel."""
        norms = torch.linalg.vector_norm(
            x.detach(), dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)
        )
        norms = norms if mask is None else norms[mask.to(norms.device, torch.bool)]
        self.absorb(
            _imatrix_sum=norms.double().square().sum().reshape(1),
            _imatrix_count=torch.tensor(norms.numel(), device=norms.device),
        )

    def share_fields(self, other: Self) -> None:
        """Know what ``other`` knows. Tables are not copied before one of the two goes on."""
        self.reset()
        for name, value in other.fields().items():
            setattr(self, name, value)
        other._own.clear()
