"""Statistics that are updated together know what each would know alone, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calipers.errors import DataError, TensorValueError
from calipers.statistics.base import Statistic
from calipers.statistics.ranges import Extrema, MovingAverage
from calipers.statistics.sums import SquareSums, TokenSquares
from calipers.statistics.tensor_statistics import TensorStatistics
from calipers.statistics.value_counts import ValueCounts

CHANNELS = QuantizationArgs(num_bits=8, strategy="group", group_size=1)
GROUPS = QuantizationArgs(num_bits=8, strategy="group", group_size=2)
MAKERS: tuple[Callable[[], Statistic], ...] = (
    ValueCounts,
    Extrema,
    lambda: Extrema("input", CHANNELS),
    SquareSums,
)


def both() -> tuple[TensorStatistics, list[Statistic]]:
    """Statistics that are updated together, and the same ones by themselves."""
    return TensorStatistics([make() for make in MAKERS]), [make() for make in MAKERS]


def assert_same(together: TensorStatistics, alone: list[Statistic]) -> None:
    for ours, theirs in zip(together.statistics, alone, strict=True):
        assert ours.fields().keys() == theirs.fields().keys()
        for name, value in theirs.fields().items():
            found = ours.fields()[name]
            assert (found.dtype, found.shape) == (value.dtype, value.shape), name
            assert torch.equal(found, value), name


def masks(tokens: int) -> dict[str, Tensor | None]:
    some = torch.rand(1, tokens) < 0.6
    return {"all": None, "none": some & False, "some": some, "numbers": some.long()}


STEPS = st.lists(
    st.tuples(
        st.integers(0, 400),
        st.sampled_from(["all", "none", "some", "numbers"]),
        st.sampled_from(DTYPES),
        st.booleans(),
    ),
    max_size=20,
)


@settings(max_examples=60)
@given(STEPS, st.integers(0, 99))
def test_all_know_what_they_would_know_alone(
    steps: list[tuple[int, str, torch.dtype, bool]], seed: int
) -> None:
    """Tensors of any length, dtype and mask, with a look at what is known now and then."""
    torch.manual_seed(seed)
    together, alone = both()
    for tokens, mask, dtype, looks in steps:
        x = (torch.randn(1, tokens, 6) * 10).to(dtype)
        chosen = masks(tokens)[mask]
        together.update(x, chosen)
        for statistic in alone:
            statistic.update(x, chosen)
        if looks:
            together.flush()
            assert_same(together, alone)
    together.flush()
    assert_same(together, alone)


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_refused_as_before(strange: float) -> None:
    together, alone = both()
    good, bad = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    bad[0, 1, 2] = strange
    together.update(good)
    for statistic in alone:
        statistic.update(good)
    alone[0].update(bad)
    with pytest.raises(TensorValueError) as expected:
        alone[1].update(bad)
    with pytest.raises(TensorValueError, match=f"^{re.escape(str(expected.value))}$"):
        together.update(bad)
    assert_same(together, alone)


def test_strange_values_of_tokens_that_do_not_count() -> None:
    together, alone = both()
    x, mask = torch.randn(1, 5, 4), torch.tensor([[True, True, False, True, False]])
    x[0, 2] = torch.nan
    together.update(x, mask)
    together.flush()
    for statistic in alone:
        statistic.update(x, mask)
    assert_same(together, alone)


def test_tensors_of_other_channels_are_refused_as_before() -> None:
    together, alone = both()
    four, three = torch.randn(1, 5, 4), torch.randn(1, 5, 3)
    together.update(four)
    for statistic in alone:
        statistic.update(four)
    *able, channels, _ = alone
    for statistic in able:
        statistic.update(three)
    with pytest.raises(DataError) as expected:
        channels.update(three)
    with pytest.raises(DataError, match=f"^{re.escape(str(expected.value))}$"):
        together.update(three)
    assert_same(together, alone)


def test_a_copy_knows_what_was_pending_and_forgets_its_own() -> None:
    (first, alone), (second, _) = both(), both()
    x = torch.randn(1, 5, 4)
    first.update(x)
    second.update(torch.randn(1, 5, 4))
    second.copy_from(first)
    second.flush()
    for statistic in alone:
        statistic.update(x)
    assert_same(second, alone)
    first.update(x)
    first.flush()
    assert_same(second, alone)


def test_what_summaries_are_enough_for() -> None:
    enough = [make() for make in MAKERS]
    others = [
        MovingAverage(),
        Extrema("input", GROUPS),
        Extrema("q"),
        ValueCounts("k", "attn_head"),
        TokenSquares(),
    ]
    assert [each.takes_summaries for each in [*enough, *others]] == [True] * 4 + [False] * 5
