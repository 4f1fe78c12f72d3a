"""What two measurements have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers import Measurements
from calipers.statistics.base import Statistic


def integers(statistics: dict[str, Statistic]) -> dict[str, Tensor]:
    """What does not depend on the order of sums: counts, tokens and extrema."""
    return {
        f"{key}.{name}": value
        for key, each in statistics.items()
        for name, value in each.fields().items()
        if not name.endswith("_sum")
    }


def assert_same(one: Measurements, other: Measurements) -> None:
    """Assert that integers and extrema are equal, and sums but for the rounding of float64."""
    assert one.info == other.info
    ours, theirs = one.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    for place, statistics in ours.items():
        assert statistics.keys() == theirs[place].keys()
        for name, value in integers(statistics).items():
            assert torch.equal(value, integers(theirs[place])[name]), (place, name)
        for key, each in statistics.items():
            fields = theirs[place][key].fields()
            for name, value in each.fields().items():
                # Batches of other shapes are multiplied in another order, in float32.
                torch.testing.assert_close(value, fields[name], rtol=1e-4, atol=1e-6)
