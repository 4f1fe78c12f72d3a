"""Real processes that speak gloo: together they find what one finds, and end together."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rank_failures
import rank_jobs
import rank_processes
import torch

from calipers.runtime.distributed import DEFAULT_TIMEOUT, SIGNS, SILENCE
from calipers.runtime.ranks import SingleProcess

WORLD = 3
ORDER_FREE = list(rank_jobs.RECIPES)
PIPELINES = ("basic", "sequential")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: Any) -> dict[str, Any]:
    (result,) = rank_processes.run(1, tmp_path_factory.mktemp("alone"), rank_jobs.JOBS)
    return result


@pytest.fixture(scope="module")
def together(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return rank_processes.run(WORLD, tmp_path_factory.mktemp("together"), rank_jobs.JOBS)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: Any) -> list[dict[str, Any]]:
    return rank_processes.run(WORLD, tmp_path_factory.mktemp("failed"), rank_failures.BAD_JOBS)


def of(result: dict[str, Any] | None, job: Callable[..., Any]) -> Any:
    assert result is not None, "the process died"
    assert job.__name__ in result, next(reversed(result.values()))
    found = result[job.__name__]
    assert not isinstance(found, str), found
    return found


def assert_same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    assert expected["parameters"]
    assert ours["parameters"].keys() == expected["parameters"].keys()
    for name, tensor in expected["parameters"].items():
        torch.testing.assert_close(ours["parameters"][name], tensor, rtol=0, atol=0, msg=name)
    for key in ("tokens", "applied", "errors", "rows"):
        assert ours[key] == expected[key], key
    assert ours["costs"].keys() == expected["costs"].keys()
    for name, costs in expected["costs"].items():
        mine = ours["costs"][name]
        assert mine.tensors == costs.tensors, name  # from counts, which add up exactly
        for output in ("weight", "input", "typical_input"):
            near = getattr(costs, output) and pytest.approx(getattr(costs, output), rel=1e-6)
            assert getattr(mine, output) == near, name


@pytest.mark.slow
class TestResults:
    @pytest.mark.parametrize("pipeline", PIPELINES)
    @pytest.mark.parametrize("name", ORDER_FREE)
    def test_are_those_of_one_process(
        self, alone: Any, together: list[Any], name: str, pipeline: str
    ) -> None:
        expected = of(alone, rank_jobs.observers_of_all_kinds)[name, pipeline]
        for rank in together:
            assert_same(of(rank, rank_jobs.observers_of_all_kinds)[name, pipeline], expected)

    @pytest.mark.parametrize("pipeline", PIPELINES)
    @pytest.mark.parametrize("name", rank_jobs.AVERAGING)
    def test_that_depend_on_order_are_the_same_in_all(
        self, together: list[Any], name: str, pipeline: str
    ) -> None:
        first, *others = (of(rank, rank_jobs.observers_of_all_kinds) for rank in together)
        for other in others:
            assert_same(other[name, pipeline], first[name, pipeline])

    @pytest.mark.parametrize("name", ["llama", "mixtral"])
    def test_of_layers_on_quantized_ones(self, alone: Any, together: list[Any], name: str) -> None:
        expected = of(alone, rank_jobs.layers_on_quantized_ones)[name]
        first, *others = (of(each, rank_jobs.layers_on_quantized_ones)[name] for each in together)
        assert first["errors"] == pytest.approx(expected["errors"], rel=1e-6)
        for other in others:
            assert other["weights"].keys() == first["weights"].keys()
            for key, weight in first["weights"].items():
                assert torch.equal(other["weights"][key], weight), key

    def test_of_tuning_are_the_same_in_all(self, alone: Any, together: list[Any]) -> None:
        before = of(alone, rank_jobs.tuned_as_a_whole)["figures"]["TuningModifier"]["before"]
        first, *others = (of(each, rank_jobs.tuned_as_a_whole) for each in together)
        figures = first["figures"]["TuningModifier"]
        assert figures["after"] < figures["before"]
        assert figures["before"] > before / 4
        for other in others:
            assert other["figures"] == first["figures"]
            for key, weight in first["weights"].items():
                assert torch.equal(other["weights"][key], weight), key

    def test_tokens_are_those_of_all(self, together: list[Any]) -> None:
        for rank in together:
            found = of(rank, rank_jobs.observers_of_all_kinds)["W8A8 percentile", "basic"]
            tokens = found["tokens"]
            assert set(tokens.values()) == {7 * 16}
            assert len(tokens) == 14

    def test_sums_that_an_earlier_run_has_left_in_all_count_once(
        self, alone: Any, together: list[Any]
    ) -> None:
        expected = of(alone, rank_jobs.sums_of_an_earlier_run)["same"]
        assert set(expected["tokens"].values()) == {7 * 16}
        for rank in together:
            assert_same(of(rank, rank_jobs.sums_of_an_earlier_run)["same"], expected)

    def test_parts_that_an_earlier_run_has_left_add_up(self, together: list[Any]) -> None:
        for rank in together:
            tokens = of(rank, rank_jobs.sums_of_an_earlier_run)["parts"]["tokens"]
            assert set(tokens.values()) == {1 + 2 + 3}

    @pytest.mark.parametrize("pipeline", PIPELINES)
    def test_a_process_without_data(self, alone: Any, together: list[Any], pipeline: str) -> None:
        expected = of(alone, rank_jobs.fewer_samples_than_processes)[pipeline]
        assert set(expected["tokens"].values()) == {2 * 16}
        for rank in together:
            assert_same(of(rank, rank_jobs.fewer_samples_than_processes)[pipeline], expected)

    def test_one_writes(self, together: list[Any]) -> None:
        found = [of(rank, rank_jobs.one_writer) for rank in together]
        assert [rank["written"] for rank in found] == [1, 0, 0]
        for rank in found:
            assert rank["output_dir"]
            assert rank["files"] == ["checkpoint"]
            assert rank["notes"] == {"samples": 7, "tokens": 7 * 16}

    def test_a_folder_that_exists_is_refused_by_all(self, together: list[Any]) -> None:
        for rank in together:
            again = of(rank, rank_jobs.one_writer)["again"]
            assert again["error"] == "CheckpointExistsError"


@pytest.mark.slow
class TestExperts:
    @pytest.mark.parametrize("pipeline", PIPELINES)
    @pytest.mark.parametrize("name", ["FP8", "NVFP4", "W8A8 percentile"])
    def test_that_only_one_process_sees(
        self, alone: Any, together: list[Any], name: str, pipeline: str
    ) -> None:
        expected = of(alone, rank_jobs.experts_here_and_there)[name, pipeline]
        experts = [n for name, n in expected["tokens"].items() if ".experts." in name]
        assert experts == [16] * 12  # each sample went to an expert of its own
        for rank in together:
            assert_same(of(rank, rank_jobs.experts_here_and_there)[name, pipeline], expected)

    def test_that_nobody_sees_are_the_same_error_for_all(
        self, alone: Any, together: list[Any]
    ) -> None:
        for observer in ("static_minmax", "memoryless_minmax"):
            expected = of(alone, rank_jobs.experts_nobody_sees)[observer, "error"]
            assert expected["error"] == "UnseenModulesError"
            assert "3 modules saw no tokens: model.layers.0.mlp.experts.3." in expected["text"]
            for rank in together:
                assert of(rank, rank_jobs.experts_nobody_sees)[observer, "error"] == expected

    @pytest.mark.parametrize("policy", ["weights_only", "peers"])
    @pytest.mark.parametrize("observer", ["static_minmax", "memoryless_minmax"])
    def test_that_nobody_sees_are_settled(
        self, alone: Any, together: list[Any], observer: str, policy: str
    ) -> None:
        alone_found, *found = (
            of(each, rank_jobs.experts_nobody_sees)[observer, policy] for each in (alone, *together)
        )
        # What a memoryless observer saw last depends on who saw it.
        expected = alone_found if observer == "static_minmax" else found[0]
        assert len(expected["result"]["applied"]) == 3
        for rank in found:
            assert rank["error"] is None, rank["text"]
            assert_same(rank["result"], expected["result"])


class TestWork:
    @pytest.mark.parametrize("name", ["NVFP4", "W8A8 static_minmax", "W4A16 optimal"])
    @pytest.mark.slow
    def test_on_weights_is_split(self, alone: Any, together: list[Any], name: str) -> None:
        everything = of(alone, rank_jobs.solving_in_parts)[name]
        parts = [of(rank, rank_jobs.solving_in_parts)[name] for rank in together]
        assert all(parts)
        assert sorted(group for part in parts for group in part) == sorted(everything)
        assert len({module for group in everything for module in group}) == 14
        # Weights that share a global scale stay together.
        assert {len(group) for group in everything} == ({1, 2, 3} if name == "NVFP4" else {1})

    def test_is_dealt_evenly(self) -> None:
        def parts(costs: list[int]) -> list[list[int]]:
            found = []
            for rank in range(3):
                ranks = SingleProcess()
                ranks.rank, ranks.world_size = rank, 3
                found.append(ranks.my_part(range(len(costs)), costs.__getitem__))
            return found

        assert parts([5, 5, 5, 1, 1, 1]) == [[0, 3], [1, 4], [2, 5]]
        assert parts([1, 9, 2, 3, 4]) == [[1], [0, 4], [2, 3]]
        assert parts([]) == [[], [], []]


@pytest.mark.slow
class TestFailures:
    @pytest.mark.parametrize("stage", rank_failures.FAILURES)
    def test_of_one_end_all(self, failed: list[Any], stage: str) -> None:
        culprit, *_ = rank_failures.FAILURES[stage]
        step = "planning" if stage == "reading data" else stage
        for number, rank in enumerate(failed):
            found = of(rank, rank_failures.everywhere_something_fails)[stage]
            assert found["unchanged"], found
            assert found["output"] == []
            if number == culprit:
                assert (found["error"], found["text"]) == ("BrokenError", "on purpose")
            else:
                assert found["error"] == "RankError"
                assert found["text"] == (
                    f"Rank {culprit} failed while {step}, so this process stops too. "
                    "BrokenError: on purpose."
                )

    def test_numbers_that_are_none(self, failed: list[Any]) -> None:
        first, culprit, last = (of(rank, rank_failures.not_a_number) for rank in failed)
        assert culprit["error"] == "TensorValueError"
        assert "batch 1, the first one with such values" in culprit["text"]
        for rank in (first, last):
            assert rank["error"] == "RankError"
            assert rank["text"].startswith("Rank 1 failed while calibrating the model")
            assert culprit["text"] in rank["text"]
        assert all(rank["unchanged"] for rank in (first, culprit, last))

    @pytest.mark.parametrize(
        ("what", "said"),
        [
            ("recipe", "(?s)agree on recipe: rank 0 has .*scheme: FP8.*rank 1 has .*scheme: NVFP4"),
            ("seed", "agree on seed: rank 0 has 0, rank 1 has 1"),
            ("model", "on model: rank 0 has LlamaForCausalLM with .*, rank 2 has LlamaForCausalLM"),
            ("pipeline", "agree on pipeline: rank 0 has sequential, rank 1 has basic"),
            ("method", "agree on method: rank 0 has rtn, rank 1 has gptq"),
            ("allow_code", "agree on allow_code: rank 0 has False, rank 1 has True"),
        ],
    )
    def test_different_arguments(self, failed: list[Any], what: str, said: str) -> None:
        for rank in failed:
            found = of(rank, rank_failures.different_arguments)[what]
            with pytest.raises(ValueError, match=said):
                raise ValueError(found["text"])
            assert found["error"] == "ConfigurationError"

    def test_memory_that_is_short_for_one(self, alone: Any, failed: list[Any]) -> None:
        expected = of(alone, rank_jobs.observers_of_all_kinds)["FP8", "basic"]
        for rank in failed:
            found = of(rank, rank_failures.different_arguments)["one is short of memory"]
            assert_same(found["result"], expected)


class TestDeath:
    @pytest.mark.parametrize("stage", rank_failures.DEATHS)
    @pytest.mark.slow
    def test_is_noticed_and_the_dead_is_named(self, tmp_path: Path, stage: str) -> None:
        dead, *_ = rank_failures.DEATHS[stage]
        job = partial(rank_failures.dying, stage=stage)
        results = rank_processes.run(4, tmp_path, [job], expected_to_die=[dead])
        assert results.pop(dead) is None
        for rank in results:
            found = of(rank, rank_failures.dying)
            assert found["error"] == "RankError", found
            assert found["text"].startswith(
                f"Rank {dead} did not finish {stage} and gave no sign of life for 6 s"
            )
            assert found["unchanged"]
            assert found["output"] == []

    @pytest.mark.slow
    def test_is_noticed_in_a_long_step_without_a_launcher(self, tmp_path: Path) -> None:
        """Processes that were started by hand: nobody tells the others to stop."""
        port = str(rank_processes.free_port())
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "3"}
        environments = [{**address, "RANK": str(rank)} for rank in range(3)]
        *others, dead = rank_processes.run(
            *(3, tmp_path, [rank_failures.dying_in_a_long_step]),
            environments=environments,
            expected_to_die=[2],
        )
        assert dead is None
        for rank in others:
            found = of(rank, rank_failures.dying_in_a_long_step)
            assert found["error"] == "RankError", found
            assert found["text"].startswith(
                "Rank 2 did not finish calibrating the model and gave no sign of life for 6 s"
            )
            assert found["calls"] < rank_failures.MANY

    def test_is_noticed_within_a_minute(self) -> None:
        looks = SILENCE / SIGNS  # of the thread that looks, and of the process that asks
        assert SILENCE + 2 * looks < timedelta(minutes=1)
        assert DEFAULT_TIMEOUT > SILENCE  # who has not come yet may be at other work

    @pytest.mark.slow
    def test_that_no_test_expects_is_told_with_its_reason(self, tmp_path: Path) -> None:
        told = "(?s)Rank 1 ended with code 3 before its result was written.*why it went"
        with pytest.raises(AssertionError, match=told):
            rank_processes.run(2, tmp_path, [rank_failures.gone_without_result])

    @pytest.mark.slow
    def test_is_not_what_takes_long(self, tmp_path: Path) -> None:
        for rank in rank_processes.run(2, tmp_path, [rank_failures.slow_writer]):
            found = of(rank, rank_failures.slow_writer)
            assert found["error"] is None, found
        assert (tmp_path / "late" / "config.json").exists()

    @pytest.mark.slow
    def test_of_the_one_that_keeps_the_store(self, tmp_path: Path) -> None:
        job = partial(rank_failures.dying, stage="calibrating the model", rank=0)
        dead, *others = rank_processes.run(
            3, tmp_path, [job], f"tcp://127.0.0.1:{rank_processes.free_port()}", expected_to_die=[0]
        )
        assert dead is None
        for rank in others:
            found = of(rank, rank_failures.dying)
            assert found["error"] == "RankError", found
            assert "by rank 0: look at the output of that process" in found["text"]
            assert found["unchanged"]
