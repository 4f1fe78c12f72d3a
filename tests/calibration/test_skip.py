"""Samples that were taken before can be passed over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from calipers.calibration.data import calibration_batches
from calipers.errors import ConfigurationError, DataError

DOCUMENTS = [[number] * 8 for number in range(1, 51)]


def samples(**options: Any) -> list[tuple[int, ...]]:
    common: dict[str, Any] = {"max_seq_length": 8, "seed": 5, "use": "evaluation"}
    batches = calibration_batches(DOCUMENTS, **common, **options)
    return [tuple(batch["input_ids"][0].tolist()) for batch in batches]


@pytest.mark.parametrize("packing", [None, True])
def test_what_follows_is_what_one_call_would_have_taken_next(packing: bool | None) -> None:
    everything = samples(num_samples=50, packing=packing)
    assert samples(num_samples=20, packing=packing) == everything[:20]
    assert samples(num_samples=20, skip=20, packing=packing) == everything[20:40]
    assert samples(num_samples=50, skip=20, packing=packing) == everything[20:]
    assert len(set(everything)) == 50


def test_too_many_and_what_cannot_be() -> None:
    with pytest.raises(DataError, match="has 50 samples, and skip=50 passes over all of them"):
        samples(skip=50)
    with pytest.raises(ConfigurationError, match=r"skip=-1 is not allowed\. Allowed: a whole num"):
        samples(skip=-1)
    ready = [{"input_ids": torch.ones(1, 8, dtype=torch.int64)}] * 3
    with pytest.raises(ConfigurationError, match="skip=1 has no meaning for batches that"):
        calibration_batches(iter(ready), skip=1, use="evaluation")
