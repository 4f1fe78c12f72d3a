"""What measurements say about themselves: of which model, and of which data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from torch import Tensor

from calipers.errors import MergeError, Option, counted


@dataclass(frozen=True)
class MeasurementsInfo:
    """Of which model and which data measurements are.

    :param model: the class of the model
    :param fingerprint: of its weights
    :param samples: the digests of the samples that were seen, sorted; one seen twice stands twice
    :param calipers: the version that measured
    :param run: of a run that is not finished, what it needs to go on; empty when it is
    """

    model: str
    fingerprint: str
    samples: tuple[str, ...] = ()
    tokens: int = 0
    calipers: str = field(default_factory=lambda: version("calipers"))
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether all data has run that was to."""
        return not self.run

    def merged(self, other: MeasurementsInfo) -> MeasurementsInfo:
        """Return what both say together; refuse other models, and samples that both have seen."""
        if (self.model, self.fingerprint) != (other.model, other.fingerprint):
            raise MergeError(
                "Cannot merge measurements of different models: "
                f"{self.model} with the fingerprint {self.fingerprint} here, {other.model} with "
                f"{other.fingerprint} there",
                hint="Measure the same files of the same model.",
            )
        for info in (self, other):
            if not info.is_complete:
                raise MergeError(
                    f"Cannot merge measurements of a run that is not finished "
                    f"({counted(len(info.samples), 'sample')} seen so far)",
                    hint="Start it again with the same arguments, and it goes on.",
                )
        common = sorted(set(self.samples) & set(other.samples))
        if common:
            both = "samples were" if len(common) > 1 else "sample was"
            raise MergeError(
                f"Cannot merge: {len(common)} {both} seen by both, and would count twice. The "
                f"first is {common[0]}",
                hint="Measure parts of the data that have nothing in common: with the same seed, "
                + Option("skip")
                + " passes over what another run has taken.",
            )
        samples = tuple(sorted((*self.samples, *other.samples)))
        return MeasurementsInfo(self.model, self.fingerprint, samples, self.tokens + other.tokens)


def sample_digest(token_ids: Tensor) -> str:
    """Return by what a sample is known: 64 bits of a digest of its tokens without padding, in hex.

    >>> import torch
    >>> sample_digest(torch.tensor([1, 2, 3]))
    '8a6ae15122001229'
    """
    ids = ",".join(map(str, token_ids.tolist()))
    return hashlib.sha256(ids.encode()).hexdigest()[:16]


def sample_fold(token_ids: Tensor, count: int) -> int:
    """Return to which of so many folds of the data a sample belongs: by its digest, in every run.

    >>> import torch
    >>> sample_fold(torch.tensor([1, 2, 3]), 2)
    1
    """
    return int(sample_digest(token_ids), 16) % count


def sample_digests(token_ids: Tensor, mask: Tensor) -> list[str]:
    """Return the digests of the rows of a batch; a row of padding alone is none."""
    kept = (ids[marks != 0] for ids, marks in zip(token_ids, mask, strict=True))
    return [sample_digest(ids) for ids in kept if len(ids)]
