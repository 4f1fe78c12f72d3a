"""Samples → batches: rows of one length, and a mask that says what is padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from calipers.calibration.data.records import special_id

Batch = dict[str, torch.Tensor]
"""What a model is called with: input_ids and attention_mask, (rows, tokens) int64, and the like."""

PaddingSide = Literal["right", "left"]


def pad_id(tokenizer: Any, vocab_size: int | None) -> int:
    """Return a token id for padding; it is masked, so it only has to exist."""
    for name in ("pad_token_id", "eos_token_id"):
        if (found := special_id(tokenizer, name, vocab_size)) is not None:
            return found
    return 0


def padded(samples: Sequence[torch.Tensor], side: PaddingSide, pad: int) -> Batch:
    """Return samples as one batch, as long as the longest of them.

    >>> padded([torch.tensor([5, 6]), torch.tensor([7])], "left", pad=0)["input_ids"].tolist()
    [[5, 6], [0, 7]]
    """
    length = max(map(len, samples))
    ids = torch.full((len(samples), length), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        start = length - len(sample) if side == "left" else 0
        ids[row, start : start + len(sample)] = sample
        mask[row, start : start + len(sample)] = 1
    return {"input_ids": ids, "attention_mask": mask}
