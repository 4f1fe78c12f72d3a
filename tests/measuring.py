"""What two measurements have in common."""

from __future__ import annotations

import torch

from calipers import Measurements
from calipers.statistics.base import Statistic


def assert_same(one: Measurements, other: Measurements) -> None:
    """Assert that integers and extrema are equal, and sums but for the order of additions."""
    assert one.info == other.info
    ours, theirs = one.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    for place, statistics in ours.items():
        assert statistics.keys() == theirs[place].keys()
        for key, each in statistics.items():
            _assert_same_fields(each, theirs[place][key])


def _assert_same_fields(one: Statistic, other: Statistic) -> None:
    ours, theirs = one.fields(), other.fields()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if name.endswith("_sum"):
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)
        else:
            assert value.dtype == theirs[name].dtype
            assert torch.equal(value, theirs[name]), (one.label(), name)
