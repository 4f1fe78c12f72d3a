"""Merging equals one run over all data; what does not go together is refused, with both shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import build, token_ids
from measuring import assert_same

import calipers
from calipers import Measurements
from calipers.errors import MergeError
from calipers.statistics.ranges import Extrema

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

IDS = token_ids(9, 16)
PARTS = (slice(0, 2), slice(2, 3), slice(3, 9))


def part(number: int | None = None, **options: object) -> Measurements:
    data = IDS if number is None else IDS[PARTS[number]]
    found: Measurements = calipers.measure(build("llama"), data, progress=False, **options)  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("parts")
    return [part(number, collect="hessian").save(folder / str(number)) for number in range(3)]


def test_merging_is_one_run_over_all_data_in_whatever_order(files: list[Path]) -> None:
    def load(number: int) -> Measurements:
        return Measurements.load(files[number])

    whole = part(collect="hessian")
    left = load(0).merge(load(1)).merge(load(2))
    right = load(2).merge(load(1).merge(load(0)))
    assert_same(left, whole)
    assert_same(right, whole)


def test_the_files_of_both_orders_are_the_same_to_the_byte(
    files: list[Path], tmp_path: Path
) -> None:
    for name, order in (("ab", (0, 1)), ("ba", (1, 0))):
        one, other = (Measurements.load(files[number]) for number in order)
        one.merge(other).save(tmp_path / name)
    assert (tmp_path / "ab").read_bytes() == (tmp_path / "ba").read_bytes()


def test_what_is_refused_changes_nothing_and_shows_both(files: list[Path]) -> None:
    mine = Measurements.load(files[0])
    info = mine.info
    assert info is not None

    def refusal(other: Measurements) -> str:
        with pytest.raises(MergeError) as error:
            mine.merge(other)
        assert error.value.exit_code == 5
        assert mine.info is info
        assert_same(mine, Measurements.load(files[0]))
        return str(error.value)

    other = Measurements.load(files[1])
    other.info = replace(info, fingerprint="0" * 64, samples=())
    assert f"with the fingerprint {info.fingerprint} here, LlamaForCausalLM with {'0' * 64}" in (
        refusal(other)
    )
    both = Measurements.load(files[1]).merge(mine)
    assert "2 samples were seen by both, and would count twice. The first is " in refusal(both)
    assert min(info.samples) in refusal(both)
    assert "statistics were measured here alone: model.layers.0.self_attn.q_proj.input/hessian" in (
        refusal(part(1))
    )
    other = Measurements.load(files[1])
    place = "model.layers.0.self_attn.q_proj", "input"
    other.replace(*place, "extrema", Extrema("input", nonfinite="ignore"))
    assert "nonfinite: 'raise' here, 'ignore' there" in refusal(other)
    assert "say neither of which model nor of which data" in refusal(Measurements())


def test_merged_statistics_share_nothing_with_those_they_came_from(files: list[Path]) -> None:
    one, other = (Measurements.load(file) for file in files[:2])
    expected = Measurements.load(files[0]).merge(Measurements.load(files[1]))
    merged = Measurements.load(files[0]).merge(other)
    for measurements in (one, other):
        for statistics in measurements.tensors().values():
            for statistic in statistics.values():
                for value in statistic.fields().values():
                    torch.Tensor.fill_(value, 7)
    assert_same(merged, expected)
