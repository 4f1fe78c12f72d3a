"""Samples → batches: rows of one length, and a mask that says what is padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from calipers.calibration.data.records import special_id
from calipers.calibration.data.sample import Sample

Batch = dict[str, torch.Tensor]
"""What a model is called with: input_ids and attention_mask, (rows, tokens) int64, and the like."""

COUNTED = "counted_tokens"
"""Which tokens of a batch count, (rows, tokens) int64, where not all but padding do.

It is no input of a model: statistics leave the other tokens out, the forward pass does not.
"""

PaddingSide = Literal["right", "left"]


def pad_id(tokenizer: Any, vocab_size: int | None) -> int:
    """Return a token id for padding; it is masked, so it only has to exist."""
    for name in ("pad_token_id", "eos_token_id"):
        if (found := special_id(tokenizer, name, vocab_size)) is not None:
            return found
    return 0


def padded(samples: Sequence[Sample], side: PaddingSide, pad: int) -> Batch:
    """Return samples as one batch, as long as the longest of them.

    >>> samples = [Sample(torch.tensor([5, 6])), Sample(torch.tensor([7]))]
    >>> padded(samples, "left", pad=0)["input_ids"].tolist()
    [[5, 6], [0, 7]]
    """
    length = max(map(len, samples))
    ids = torch.full((len(samples), length), pad, dtype=torch.int64)
    mask, counted = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        start = length - len(sample) if side == "left" else 0
        place = slice(start, start + len(sample))
        ids[row, place], mask[row, place] = sample.ids, 1
        counted[row, place] = 1 if sample.counted is None else sample.counted.long()
    marked = any(sample.counted is not None for sample in samples)
    return {"input_ids": ids, "attention_mask": mask, **({COUNTED: counted} if marked else {})}


def counted_tokens(batch: Batch) -> torch.Tensor:
    """Return which tokens of a batch count, (rows, tokens): all but padding, or fewer."""
    return batch.get(COUNTED, batch["attention_mask"])
