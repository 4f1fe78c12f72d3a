"""Intervals: against the normal distribution, by how often they are right, and paired."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from calipers.evaluation.bootstrap import RESAMPLES, Bootstrap, Estimate, Sums


def mean(sums: Sums) -> torch.Tensor:
    return sums["sum"] / sums["count"]


def of_values(values: torch.Tensor) -> Bootstrap:
    return Bootstrap({"sum": values, "count": torch.ones_like(values)})


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = torch.randn(2000, dtype=torch.float64) + 3
    found = of_values(values).estimate(mean)
    error = float(values.std()) / math.sqrt(len(values))
    assert found.value == pytest.approx(float(values.mean()), rel=1e-12)
    assert found.low == pytest.approx(found.value - 1.96 * error, abs=0.1 * error)
    assert found.high == pytest.approx(found.value + 1.96 * error, abs=0.1 * error)


def test_it_holds_the_truth_in_95_of_100_cases() -> None:
    """Samples of different length, as texts are; the truth is the ratio of expectations, 2."""
    hits = 0
    for _ in range(200):
        count = torch.randint(1, 50, (80,)).double()
        values = 2 * count + count.sqrt() * torch.randn(80, dtype=torch.float64)
        hits += Bootstrap({"sum": values, "count": count}).estimate(mean).holds(2)
    assert 180 <= hits <= 198  # 190 ± 3: P(outside) < 1e-3, and the seed is fixed


def test_differences_are_paired() -> None:
    """What is hard for both does not blur the difference."""
    hard = torch.rand(100, dtype=torch.float64) * 10
    better = torch.rand(100, dtype=torch.float64) * 0.01 + 0.1
    both = Bootstrap({"one": hard, "other": hard + better, "count": torch.ones(100)})
    difference = both.estimate(lambda sums: (sums["other"] - sums["one"]) / sums["count"])
    alone = both.estimate(lambda sums: sums["one"] / sums["count"])
    assert not difference.holds(0)
    assert difference.high - difference.low < (alone.high - alone.low) / 100


def test_two_estimates_use_the_same_draws() -> None:
    values = torch.rand(30)
    one, other = of_values(values), of_values(values)
    assert one.estimate(mean) == other.estimate(mean) == one.estimate(mean)


def test_many_samples_are_drawn_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.rand(70)
    whole = of_values(values)._draws
    monkeypatch.setattr("calipers.evaluation.bootstrap._AT_ONCE", 7 * 70)
    pieces = of_values(values)._draws
    assert whole.shape == pieces.shape == (RESAMPLES, 2)
    assert torch.equal(pieces[:, 1], torch.full((RESAMPLES,), 70.0, dtype=torch.float64))


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=12))
def test_bounds_lie_around_the_value_and_within_the_samples(values: list[float]) -> None:
    found = of_values(torch.tensor(values, dtype=torch.float64)).estimate(mean)
    slack = 1e-9
    assert min(values) - slack <= found.low <= found.value + slack
    assert found.value - slack <= found.high <= max(values) + slack


def test_one_sample_can_mean_anything() -> None:
    found = of_values(torch.tensor([4.0])).estimate(mean)
    assert found == Estimate(4.0, -math.inf, math.inf)
    assert found.as_dict() == {"value": 4.0, "low": None, "high": None}
    assert found.holds(1e9)
