"""Statistics of a stream keep their laws, and have one rule for what is not finite."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import STATISTIC_LAWS, STATISTICS, Stream, assert_same_statistic, measured

import calipers.statistics
from calipers.errors import LayoutError, MergeError, TensorValueError
from calipers.statistics.base import Statistic
from calipers.statistics.ranges import Extrema, MovingAverage
from calipers.statistics.sums import BlockHessians, SquareSums
from calipers.statistics.value_counts import ValueCounts


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 8, generator=generator).bfloat16() for _ in range(4)]


@pytest.mark.parametrize("law", STATISTIC_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", STATISTICS)
def test_law(name: str, law: Callable[[str, Stream], None]) -> None:
    law(name, batches())


def test_every_statistic_keeps_the_laws() -> None:
    names = [each.name for each in pkgutil.iter_modules(calipers.statistics.__path__)]
    modules = [importlib.import_module(f"calipers.statistics.{name}") for name in names]
    everything = [each for module in modules for each in vars(module).values()]
    kinds = [each for each in everything if isinstance(each, type) and issubclass(each, Statistic)]
    streams = {kind.__name__ for kind in kinds if kind.all_reductions()}
    of_gradients = {"Sensitivity"}  # nobody shows it tensors; tested with what it measures
    assert streams - of_gradients == set(STATISTICS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BlockHessians(4), BlockHessians(8)),
        (SquareSums(), SquareSums(nonfinite="ignore")),
        (ValueCounts("input"), ValueCounts("output")),
        (ValueCounts("k"), ValueCounts("k", "attn_head")),
        (Extrema("input"), Extrema("output")),
        (MovingAverage(averaging_constant=0.1), MovingAverage(averaging_constant=0.2)),
    ],
)
def test_what_differs_cannot_be_merged(one: Statistic, other: Statistic) -> None:
    with pytest.raises(MergeError, match="the configurations differ"):
        one.merge(other)


@pytest.mark.parametrize(("dtype", "exact"), [(torch.float16, True), (torch.float32, False)])
def test_counts_are_exact_if_nothing_was_rounded(dtype: torch.dtype, exact: bool) -> None:
    stream = [x.to(dtype) for x in batches()]
    assert measured("ValueCounts", stream).is_exact is exact
    assert not measured("ValueCounts", [*stream, torch.ones(1, 8)]).is_exact


def test_a_mask_that_is_none_is_refused() -> None:
    for name in STATISTICS:
        with pytest.raises(LayoutError, match=r"one entry per token of 'input', shape \(2, 5\)"):
            measured(name, batches(), torch.ones(2, 6))
        with pytest.raises(LayoutError, match="added to attention scores"):
            measured(name, batches(), torch.full((2, 5), -1e9))


class TestNotFinite:
    """One rule for NaN and Inf, whoever sums up inputs."""

    SUMS = pytest.mark.parametrize("name", ["SquareSums", "BlockHessians"])

    def spoilt(self) -> torch.Tensor:
        x = batches()[1].clone()
        x[0, 1, 3], x[1, 4, 0] = torch.nan, torch.inf
        return x

    @SUMS
    def test_is_refused_and_nothing_recorded(self, name: str) -> None:
        seen = measured(name, batches()[:1])
        seen.owner = "q_proj"
        message = r"^q_proj was given 2 non-finite values .* among 80, in a tensor of shape \(2, 5,"
        with pytest.raises(TensorValueError, match=message):
            seen.update(self.spoilt())
        assert_same_statistic(seen, measured(name, batches()[:1]))

    @SUMS
    def test_what_is_masked_may_be_anything(self, name: str) -> None:
        mask = torch.isfinite(self.spoilt()).all(-1)
        seen = measured(name, [self.spoilt()], mask)
        assert_same_statistic(seen, measured(name, [self.spoilt()[mask]]))

    @SUMS
    @pytest.mark.parametrize("masked", [False, True])
    def test_or_such_tokens_are_left_out(self, name: str, masked: bool) -> None:
        mask = torch.tensor([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]]) if masked else None
        seen: Any = STATISTICS[name]()
        seen.nonfinite = "ignore"
        seen.update(self.spoilt(), mask)
        finite = torch.isfinite(self.spoilt()).all(-1)
        kept = self.spoilt()[finite if mask is None else finite & mask.bool()]
        assert_same_statistic(seen, measured(name, [kept]))

    def test_or_they_are_kept(self) -> None:
        sums = SquareSums(nonfinite="keep")
        sums.update(self.spoilt())
        assert torch.isfinite(sums._imatrix_sum).tolist() == [False, True, True, False] + [True] * 4
        assert sums.num_tokens == 10

    def test_values_whose_squares_overflow_are_finite(self) -> None:
        """They are told apart from NaN; the weight is judged without such sums."""
        sums = BlockHessians(4)
        sums.update(torch.full((1, 4), 1e20))
        assert sums.num_tokens == 1
        assert torch.isinf(sums._hessian_sum).all()

    @pytest.mark.parametrize("nonfinite", ["raise", "ignore"])
    def test_of_a_range(self, nonfinite: str) -> None:
        seen = Extrema(nonfinite=nonfinite)
        seen.owner = "q_proj"
        if nonfinite == "raise":
            with pytest.raises(TensorValueError, match=r"^q_proj was given 2 non-finite"):
                seen.update(self.spoilt())
            assert not seen.fields()
        else:
            seen.update(self.spoilt())
            finite = self.spoilt()[torch.isfinite(self.spoilt())]
            assert (seen.min_vals, seen.max_vals) == (finite.min(), finite.max())
            seen.update(torch.full((1, 8), torch.nan))
            assert (seen.num_tokens, int(seen.observed_nonfinite)) == (10, 10)
