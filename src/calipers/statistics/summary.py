"""What one pass each over some tensors has found, for several statistics at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from calipers.kernels.channels import ChannelSummary


class TensorSummary:
    """What was found in tensors of shape (…, channels) whose values are all finite.

    :param tokens: how many of them count, in all
    :param channels: what was found in the channels of each tensor, in the order of the tensors
    """

    def __init__(self, tokens: int, channels: Sequence[ChannelSummary]) -> None:
        ranges = torch.stack([each.extrema for each in channels])
        self.min_vals, self.max_vals = ranges[:, 0].amin(0), ranges[:, 1].amax(0)
        self.square_sums = [each.square_sums for each in channels]
        self.tokens = torch.tensor(tokens, device=ranges.device)
        self.like = ranges.new_empty(0)  # has the dtype, and nothing else

    def extrema(self, *, of_channels: bool) -> dict[str, Tensor]:
        """Return the extrema of each channel, or of all, and what is remembered beside them."""
        low, high = self.min_vals, self.max_vals
        return {
            "min_vals": low if of_channels else low.amin(0, keepdim=True),
            "max_vals": high if of_channels else high.amax(0, keepdim=True),
            "observed_tokens": self.tokens,
            "observed_nonfinite": torch.zeros_like(self.tokens),
            "observed_like": self.like,
        }
