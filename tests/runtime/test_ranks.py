"""Every implementation of ranks obeys one contract, and callers do not know which one they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_laws
import rank_processes
from families import build
from measuring import assert_same

import calipers
from calipers.errors import RankError

TEXTS = [[(7 * i + j) % 250 + 1 for j in range(5 + 3 * i)] for i in range(7)]


def check_laws(results: list[dict[str, Any]]) -> None:
    size = len(results)
    assert [result["rank"] for result in results] == [(rank, size) for rank in range(size)]
    for rank, result in enumerate(results):
        assert result["shared"] == [(other, [float(other)] * 2) for other in range(size)]
        both, last = result["merged"]
        assert (both["min_vals"], both["max_vals"]) == ([-size], [size])
        assert both["observed_tokens"] == size
        assert (last["min_vals"], last["max_vals"], last["observed_tokens"]) == ([1], [1], 1)
        if rank == size - 1:
            assert result["failure"] == ("ValueError", "on purpose")
        else:
            name, text = result["failure"]
            assert name == "RankError"
            assert f"Rank {size - 1} failed while working" in text
            assert "on purpose" in text
        if size == 1:
            assert result["disagreement"] is None
        else:
            name, text = result["disagreement"]
            assert name == "ConfigurationError"
            assert "The ranks do not agree on data: rank 0 has 0, rank 1 has 1" in text
    assert sorted(job for result in results for job in result["part"]) == list(range(7))
    loads = [sum(result["part"]) for result in results]
    assert max(loads) - min(loads) <= 1


def test_laws_of_one_process() -> None:
    check_laws(rank_laws.laws_alone())


@pytest.mark.parametrize("world", [2, 3])
def test_laws_of_threads(world: int) -> None:
    check_laws(rank_laws.in_threads(world, rank_laws.laws))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_laws_of_processes(world: int, tmp_path: Path) -> None:
    results = rank_processes.run(world, tmp_path, [rank_laws.laws_of_process])
    check_laws([result["laws_of_process"] for result in results])


@pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")
class TestMeasuringInThreads:
    """A whole call over ranks that Calipers has never heard of."""

    def test_finds_what_one_process_finds(self) -> None:
        options: dict[str, Any] = {"batch_size": 1, "collect": "hessian", "progress": False}
        expected = calipers.measure(build(), TEXTS, **options)
        models = [build(), build()]
        together = rank_laws.in_threads(
            2, lambda ranks: calipers.measure(models[ranks.rank], TEXTS, **options)
        )
        for found in together:
            assert found.info.samples == expected.info.samples
            assert_same(found, expected)

    def test_a_failure_ends_all(self) -> None:
        models = [build(), build()]

        def job(ranks: rank_laws.Ranks) -> None:
            texts = TEXTS if ranks.rank == 0 else [["no", "tokens"]]
            calipers.measure(models[ranks.rank], texts, progress=False)

        with pytest.raises(RankError, match="Rank 1 failed while planning"):
            rank_laws.in_threads(2, job)
