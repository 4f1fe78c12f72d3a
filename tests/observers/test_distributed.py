"""Real processes that speak gloo: what they know afterwards is what one process would know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rank_processes
import ranks
import torch
from torch import multiprocessing


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)])
def results(request: pytest.FixtureRequest, tmp_path_factory: Any) -> list[dict[str, Any]]:
    world, folder = request.param, tmp_path_factory.mktemp("ranks")
    rank_processes.ready_context()
    multiprocessing.start_processes(
        ranks.run_rank, (world, str(folder)), world, start_method="forkserver"
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


def of(results: list[dict[str, Any]], scenario: Callable[..., Any]) -> list[Any]:
    found = [rank[scenario.__name__] for rank in results]
    for result in found:
        if isinstance(result, str) and result.startswith("Traceback"):
            pytest.fail(result)
    return found


def assert_equal(ours: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(ours[key], expected[key], rtol=0, atol=0)


def test_static_minmax_is_that_of_one_process(results: list[dict[str, Any]]) -> None:
    for result in of(results, ranks.static_minmax):
        for dtype, fields in result.items():
            single = ranks.observe("static_minmax", list(range(ranks.BATCHES)), dtype)
            assert_equal(fields, single.fields())


def test_a_rank_that_saw_nothing_knows_what_the_others_know(results: list[dict[str, Any]]) -> None:
    single = ranks.observe("static_minmax", list(range(ranks.BATCHES)))
    for result in of(results, ranks.static_minmax_idle):
        assert_equal(result, single.fields() | dict(enumerate(single)))


def test_value_counts_are_those_of_one_process(results: list[dict[str, Any]]) -> None:
    for result in of(results, ranks.value_counts):
        for dtype, known in result.items():
            single = ranks.observe("percentile", list(range(ranks.BATCHES)), dtype)
            assert_equal(known, single.fields() | dict(enumerate(single)))
    single = ranks.observe("entropy", list(range(ranks.BATCHES)))
    for known in of(results, ranks.value_counts_idle):
        assert_equal(known, single.fields() | dict(enumerate(single)))


def test_values_after_a_sync_are_counted_once(results: list[dict[str, Any]]) -> None:
    world = len(results)
    single = ranks.build("percentile")
    for rank in range(world):
        first, *more = ranks.share(rank, world)
        single(ranks.batches(torch.bfloat16)[first])
        for index in more if rank != world - 1 else []:
            single(ranks.batches(torch.bfloat16)[index])(ranks.batches(torch.float16)[index])
    for handles, handles_of_adopted, adopted, known in of(results, ranks.value_counts_more):
        assert (handles, handles_of_adopted) == (0, 0)
        assert_equal(known, single.fields())
        assert_equal(adopted, single.fields())


@pytest.mark.parametrize("scenario", [ranks.imatrix, ranks.imatrix_idle])
def test_imatrix_is_that_of_one_process(results: list[dict[str, Any]], scenario: Any) -> None:
    single = ranks.gather(list(range(ranks.BATCHES)), torch.bfloat16)(ranks.weight())
    for result in of(results, scenario):
        assert_equal(result, single.fields())


@pytest.mark.parametrize("scenario", [ranks.hessian, ranks.hessian_idle])
def test_hessians_are_those_of_one_process(results: list[dict[str, Any]], scenario: Any) -> None:
    single = ranks.gather_hessian(list(range(ranks.BATCHES)))(ranks.weight())
    for result in of(results, scenario):
        assert_equal(result, single.fields())


def test_histogram_mse_is_that_of_one_process(results: list[dict[str, Any]]) -> None:
    single = ranks.observe("histogram_mse", list(range(ranks.BATCHES)), torch.bfloat16)
    for known in of(results, ranks.histogram_mse):
        assert_equal(known, single.fields() | dict(enumerate(single)))


def test_moving_averages_are_averaged(results: list[dict[str, Any]]) -> None:
    found = of(results, ranks.moving_average)
    for name in ("minmax", "mse"):
        mean = torch.stack([result[name, "before"] for result in found]).double().mean(0)
        for result in found:
            torch.testing.assert_close(result[name, "after"].double(), mean, rtol=1e-6, atol=0)


def test_an_idle_rank_does_not_pull_the_average_down(results: list[dict[str, Any]]) -> None:
    found = of(results, ranks.moving_average_idle)
    seen = [result["before"].double() for result in found if result["before"] is not None]
    assert len(seen) == len(results) - 1
    for result in found:
        torch.testing.assert_close(
            result["after"].double(), torch.stack(seen).mean(0), rtol=1e-6, atol=0
        )
        assert result["scale"].dtype == torch.bfloat16


def test_where_nobody_saw_anything_there_is_nothing_to_do(results: list[dict[str, Any]]) -> None:
    assert of(results, ranks.nobody_saw_anything) == [(0, False)] * len(results)


def test_memoryless_observers_do_not_sync(results: list[dict[str, Any]]) -> None:
    assert of(results, ranks.memoryless) == [(0, True)] * len(results)


def test_a_second_sync_does_nothing(results: list[dict[str, Any]]) -> None:
    assert of(results, ranks.twice) == [(0, True)] * len(results)


def test_data_after_a_sync_counts_once(results: list[dict[str, Any]]) -> None:
    world = len(results)
    last = world - 1
    seen = [i for r in range(world) for i in ranks.share(r, world)[: 1 if r == last else None]]
    extrema = ranks.observe("static_minmax", seen)
    sums = ranks.gather(seen, torch.bfloat16)
    for minmax, imatrix in of(results, ranks.more_after_sync):
        assert_equal(minmax, extrema.fields())
        assert_equal(imatrix, sums.fields())


def test_a_rank_may_start_anew(results: list[dict[str, Any]]) -> None:
    single = ranks.gather([*range(ranks.BATCHES), 0], torch.bfloat16)
    for fields in of(results, ranks.one_starts_anew):
        assert_equal(fields, single.fields())


def test_tensors_that_were_handed_out_stay(results: list[dict[str, Any]]) -> None:
    assert of(results, ranks.what_others_hold_stays) == [True] * len(results)


def test_shapes_must_agree(results: list[dict[str, Any]]) -> None:
    for message in of(results, ranks.different_shapes):
        assert (
            "Cannot synchronise Observer 'static_minmax' (input): ranks hold 'min_vals'" in message
        )
        assert "[(1,), (2,)" in message


def test_configurations_must_agree(results: list[dict[str, Any]]) -> None:
    for message in of(results, ranks.different_configurations):
        assert "the configurations differ.\n  args.num_bits: 8 here, 7 there" in message


def test_ranks_exchange_different_amounts(results: list[dict[str, Any]]) -> None:
    for amounts in of(results, ranks.different_amounts):
        assert amounts == [1000 * rank for rank in range(len(results))]


def test_without_other_ranks_there_is_nothing_to_do() -> None:
    assert ranks.sync(ranks.observe("static_minmax", [0])) == 0
