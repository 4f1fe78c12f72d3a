"""A sample: the token ids that run through the model in one row, and which of them count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Sample:
    """Token ids of one sample, or of a document that samples are cut from.

    :param ids: the token ids, (tokens,) int64
    :param counted: which of them count, (tokens,) bool; None where all do
    """

    ids: Tensor
    counted: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Sample:
        """Return some of its tokens."""
        return Sample(self.ids[part], None if self.counted is None else self.counted[part])

    @property
    def num_counted(self) -> int:
        """How many of its tokens count."""
        return len(self) if self.counted is None else int(self.counted.sum())

    @classmethod
    def joined(cls, samples: Sequence[Sample]) -> Sample:
        """Put samples one after another."""
        ids = torch.cat([sample.ids for sample in samples])
        if all(sample.counted is None for sample in samples):
            return cls(ids)
        every = (torch.ones_like(s.ids, dtype=torch.bool) for s in samples)
        marks = [
            ones if sample.counted is None else sample.counted
            for sample, ones in zip(samples, every, strict=True)
        ]
        return cls(ids, torch.cat(marks))
