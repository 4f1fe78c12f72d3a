"""Solvers are functions of their problem alone, and better the more they try."""

from __future__ import annotations

import itertools

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import nvfp4
from torch import Tensor

from calipers.errors import NoStatisticsError
from calipers.numerics.layout import Layout
from calipers.numerics.qparams import global_scale_of
from calipers.observers import Observer
from calipers.observers.classic import searched_range
from calipers.observers.options import SearchOptions
from calipers.solvers.distribution import entropy_range, percentile_range
from calipers.solvers.importance import Weights
from calipers.solvers.scales import (
    CountedValues,
    Problem,
    Solution,
    Solutions,
    common_global_scale,
    error_of,
    exact,
    least_error,
    minmax,
    of_range,
)
from calipers.statistics.ranges import Extrema
from calipers.statistics.value_counts import ValueCounts

FORMATS = {
    "int4": QuantizationArgs(num_bits=4, group_size=16),
    "int4 asym": QuantizationArgs(num_bits=4, group_size=16, symmetric=False),
    "fp8 channel": QuantizationArgs(num_bits=8, type="float", strategy="channel"),
    "nvfp4": nvfp4(16),
}
HALVED = SearchOptions(maxshrink=0.5, grid=50, patience=1000, norm=2.0)


def problem_of(weight: Tensor, args: QuantizationArgs, weights: Weights = Weights()) -> Problem:  # noqa: B008
    pieces = Layout.of("weight", args).pieces(weight)
    return Problem(pieces, pieces.amin((0, -2, -1)), pieces.amax((0, -2, -1)), args, 2.0, weights)


def usual_of(weight: Tensor, args: QuantizationArgs) -> Tensor | None:
    return global_scale_of(weight.abs().max()) if args == FORMATS["nvfp4"] else None


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("weighed", [False, True])
def test_who_tries_more_errs_less(fmt: str, weighed: bool) -> None:
    torch.manual_seed(0)
    weight, args = torch.randn(8, 64), FORMATS[fmt]
    weights = Weights(Layout.of("weight", args).over_columns(torch.rand(64) + 0.1))
    problem = problem_of(weight, args, weights if weighed else Weights())
    usual = usual_of(weight, args)
    found = [
        minmax(problem, usual),
        of_range(problem, *searched_range(problem, HALVED), usual),
        exact(problem, usual),
    ]
    errors = [solution.error for solution in found]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) > 1
    for solution in found:
        assert solution.error == error_of(problem, solution.scale, solution.zero_point, usual)


@pytest.mark.parametrize("fmt", FORMATS)
def test_min_max_is_what_an_observer_finds(fmt: str) -> None:
    weight, args = torch.randn(8, 64), FORMATS[fmt]
    observer = Observer.load_from_registry("memoryless_minmax", args=args)(weight)
    found, expected = (
        minmax(problem_of(weight, args), usual_of(weight, args)),
        observer.get_qparams(),
    )
    assert torch.equal(found.scale.float(), expected["scale"].float())
    assert torch.equal(found.zero_point.float(), expected["zero_point"].float())


@pytest.mark.parametrize(
    "solve", [minmax, exact, lambda problem: of_range(problem, *searched_range(problem, HALVED))]
)
def test_a_problem_stays_as_it_is(solve: object) -> None:
    weight = torch.randn(8, 64)
    problem = problem_of(weight, FORMATS["int4"], Weights(torch.rand(4, 1, 16)))
    before = [part.clone() for part in (*problem[:3], problem.weights.diagonal)]  # type: ignore[union-attr]
    first, second = (solve(problem) for _ in range(2))  # type: ignore[operator]
    assert all(map(torch.equal, before, (*problem[:3], problem.weights.diagonal)))
    assert isinstance(first, Solution)
    assert torch.equal(first.scale, second.scale)
    assert first.error == second.error


class TestCounts:
    def counted(self, x: Tensor, args: QuantizationArgs) -> CountedValues:
        counts, ends = ValueCounts(), Extrema()
        counts.update(x)
        ends.update(x)
        return CountedValues(counts.distributions(), ends.min_vals, ends.max_vals, args)

    def test_counts_are_values_that_occur_often(self) -> None:
        x = (torch.randn(20, 50) * 4).round().bfloat16()
        args = QuantizationArgs(num_bits=4)
        pieces = x.reshape(1, 1, 1, -1)
        by_values = exact(Problem(pieces, x.min().reshape(1), x.max().reshape(1), args))
        scale, zero_point = least_error(self.counted(x, args))
        assert torch.equal(scale, by_values.scale)
        assert torch.equal(zero_point, by_values.zero_point)

    def test_ranges_lie_within_the_extrema(self) -> None:
        x = torch.randn(20, 50)
        for symmetric in (True, False):
            args = QuantizationArgs(num_bits=8, symmetric=symmetric)
            low, high = percentile_range(self.counted(x, args), 100)
            assert (low, high) == (x.min(), x.max())
            for low, high in (
                percentile_range(self.counted(x, args), 90),
                entropy_range(self.counted(x, args), 512),
            ):
                assert x.min() <= low < 0 < high <= x.max()


class TestCommonGlobalScale:
    def weights(self) -> list[Tensor]:
        torch.manual_seed(3)
        return [torch.randn(8, 64) * scale for scale in (1, 30, 0.01)]

    def solutions(self) -> list[Solutions]:
        return [Solutions(problem_of(weight, FORMATS["nvfp4"])) for weight in self.weights()]

    def usual(self) -> Tensor:
        return global_scale_of(torch.stack([w.abs().max() for w in self.weights()]).max())

    def test_is_the_same_in_whatever_order(self) -> None:
        found = {
            float(common_global_scale(order, self.usual()))
            for order in itertools.permutations(self.solutions())
        }
        assert len(found) == 1

    def test_errs_no_more_than_min_max_under_the_usual_one(self) -> None:
        common = common_global_scale(self.solutions(), self.usual())
        error = sum(each.under(common).error for each in self.solutions())
        assert error <= sum(each.minmax_error(self.usual()) for each in self.solutions())

    def test_a_weight_that_was_changed_is_not_solved(self) -> None:
        weight = torch.randn(8, 64)
        solutions = Solutions(problem_of(weight, FORMATS["nvfp4"]), "up_proj")
        known = solutions.under(self.usual())
        weight.mul_(2)
        assert solutions.under(self.usual()) is known
        with pytest.raises(NoStatisticsError, match=r"^up_proj cannot trust, since it was changed"):
            solutions.under(self.usual() / 2)
