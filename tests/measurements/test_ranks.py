"""Several processes, each with its share of the data, find what one finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
from measuring import assert_same, measure_experts, measure_sensitivity

from calipers import Measurements

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[Any]]]:
    folders = {world: tmp_path_factory.mktemp(str(world)) for world in (1, 3)}
    return {
        world: (folder, rank_processes.run(world, folder, [measure_experts]))
        for world, folder in folders.items()
    }


def test_each_process_has_what_one_alone_finds(
    found: dict[int, tuple[Path, list[Any]]],
) -> None:
    (alone,) = found[1][1]
    expected = Measurements.load(alone["measure_experts"])
    assert expected.info is not None
    assert len(expected.info.samples) == 5
    folder, results = found[3]
    for result in results:
        assert_same(Measurements.load(result["measure_experts"]), expected)
    assert_same(Measurements.load(folder / "output.safetensors"), expected)
    tokens = {
        name: expected.tokens(f"model.layers.0.mlp.experts.{name}.up_proj") for name in range(4)
    }
    assert tokens == {0: 32, 1: 32, 2: 16, 3: 0}


@pytest.fixture(scope="module")
def sensitivities(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    places = {world: tmp_path_factory.mktemp(f"sensitivity{world}") for world in (1, 2)}
    return {
        world: rank_processes.run(world, place, [measure_sensitivity])
        for world, place in places.items()
    }


@pytest.mark.parametrize("samples", [5, 1])  # of one, a process sees nothing
def test_gradients_of_all_processes_add_up(
    sensitivities: dict[int, list[Any]], samples: int
) -> None:
    (alone,), together = sensitivities[1], sensitivities[2]
    expected = Measurements.load(alone["measure_sensitivity"][str(samples)])
    for rank in together:
        found = Measurements.load(rank["measure_sensitivity"][str(samples)])
        assert_same(found, expected)
        for name in ("model.layers.0.self_attn.q_proj", "lm_head"):
            mine, theirs = (each.get(name, "weight", "sensitivity") for each in (found, expected))
            assert mine is not None
            assert theirs is not None
            assert mine.num_tokens == samples * 15
            torch.testing.assert_close(mine.per_token(), theirs.per_token(), rtol=1e-6, atol=0)
