"""A tensor that is being observed: which tokens of it count, its pieces, and their extrema."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import LayoutError, TensorKindError, not_finite
from calipers.kernels.extrema import Extrema, extrema
from calipers.numerics.layout import Layout
from calipers.numerics.tensors import as_float


class Observation(NamedTuple):
    """The tensor that is observed right now, cut into pieces.

    :param observed: what is handed on: the pieces themselves, or their canonical view
    """

    observed: Tensor
    pieces: Tensor
    layout: Layout
    extrema: Extrema
    tokens: int

    @property
    def is_finite_nowhere(self) -> bool:
        """Whether every value is NaN or Inf."""
        return self.extrema.nonfinite == self.pieces.numel()

    def marks(self) -> dict[str, Tensor]:
        """Return what is remembered of any tensor: its dtype, tokens, and what was left out."""
        like = {"observed_like": self.pieces.new_empty(0)}
        if not self.tokens and not self.extrema.nonfinite:  # as of most weights
            return like
        tokens = torch.full((), self.tokens, device=self.pieces.device)
        return {"observed_tokens": tokens, **self.left_out(), **like}

    def left_out(self) -> dict[str, Tensor]:
        """Return how many values were not finite."""
        count, device = self.extrema.nonfinite, self.pieces.device
        return {"observed_nonfinite": torch.full((), count, device=device)}

    def canonical_view(self) -> Tensor:
        """Return the pieces as (observations, *qparam_shape, group); what is not finite is zero.

        Zero is in every range and quantizes without error: it adds nothing to a result.
        """
        view = self.pieces.flatten(-2)
        return view.nan_to_num(0.0, 0.0, 0.0) if self.extrema.nonfinite else view

    def without_missing(self, low: Tensor, high: Tensor) -> Observation:
        """Let pieces without any finite value have the range they had before."""
        missing, found = self.extrema.missing, self.extrema
        if missing is None or low.shape != found.min_vals.shape:
            return self
        low, high = low.to(found.min_vals), high.to(found.max_vals)
        kept = found._replace(
            min_vals=torch.where(missing, low, found.min_vals),
            max_vals=torch.where(missing, high, found.max_vals),
        )
        return self._replace(extrema=kept)


def observation_of(
    value: Tensor,
    base_name: str,
    args: QuantizationArgs,
    *,
    g_idx: Tensor | None = None,
    mask: Tensor | None = None,
    nonfinite: str = "raise",
    label: Callable[[], str],
) -> Observation | None:
    """Cut a tensor into pieces, and find their extrema; None if nothing of it counts.

    :param nonfinite: whether NaN and Inf are an error (``raise``), or left out
    :param label: what messages call the one who observes
    """
    if value.numel() == 0:
        return None
    if value.is_complex():
        raise TensorKindError(
            f"was given a complex tensor ({value.dtype})",
            subject=label(),
            hint="Observe its real and imaginary parts separately, or exclude the module",
        )
    value = value.detach()  # takes less time than to switch gradients off
    try:
        layout = Layout.of(base_name, args, g_idx)
        if mask is not None:
            value = layout.select_tokens(value, mask)
            if value.numel() == 0:
                return None
        pieces = layout.pieces(as_float(value))
    except LayoutError as error:
        error.add_place(label())
        raise
    found = extrema(pieces)
    if found.nonfinite and nonfinite == "raise":
        raise not_finite(label(), found.nonfinite, value.numel(), value.shape)
    return Observation(pieces, pieces, layout, found, layout.tokens(value))
