"""Halves of the data are what each alone would have been; runs stop by them, always alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_jobs
import torch
from families import build, token_ids
from measuring import assert_same

import calipers
from calipers import Measurements
from calipers.errors import ConfigurationError, MeasurementsError
from calipers.measurements import sufficiency
from calipers.measurements.info import sample_digest
from calipers.measurements.partial import PartialFile
from calipers.measurements.tensors import whole_of
from calipers.statistics.base import Statistic

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

IDS = token_ids(40, 12)
LOOSE, STRICT = 2.0, 1e-9


def measured(data: Any = IDS, **options: Any) -> Measurements:
    options = {"batch_size": 1, "progress": False, "shuffle": False, **options}
    return calipers.measure(build("llama"), data, **options)


def half(number: int) -> torch.Tensor:
    """Return the samples of a half, by the last digit of their digests."""
    return torch.stack([ids for ids in IDS if int(sample_digest(ids)[-1], 16) % 2 == number])


def fields(statistic: Statistic) -> dict[str, torch.Tensor]:
    return {n: v for n, v in statistic.fields().items() if not n.endswith("_sum")}


def test_halves_are_what_each_alone_would_be(tmp_path: Path) -> None:
    whole = measured(collect="outputs,attention")
    back = Measurements.load(whole.save(tmp_path / "m"))
    alone = [measured(half(number), collect="outputs,attention").tensors() for number in (0, 1)]
    for found in (whole, back):
        halves = found.halves()
        assert halves.keys() == found.tensors().keys()
        for place, both in halves.items():
            for number, statistics in enumerate(both):
                assert set(statistics) >= {"counts", "extrema"}
                for key, statistic in statistics.items():
                    truth = alone[number][place][key]
                    assert fields(statistic).keys() == fields(truth).keys()
                    for name, value in fields(truth).items():
                        assert torch.equal(fields(statistic)[name], value), (place, key, name)
                    if key == "squares":
                        sums = (each.fields()["_imatrix_sum"] for each in (statistic, truth))
                        torch.testing.assert_close(*sums)


@pytest.mark.parametrize(
    "options", [{"pipeline": "sequential"}, {"share_inputs": False}, {"data": list(IDS.split(8))}]
)
def test_how_data_runs_changes_no_half(options: dict[str, Any]) -> None:
    """Batches of both halves that come ready-made are cut."""
    expected, found = measured().with_folds(), measured(**options).with_folds()
    for place, statistics in expected.items():
        for key, statistic in statistics.items():
            tokens = statistic.num_tokens, found[place][key].num_tokens
            assert tokens[0] == tokens[1], (place, key)


def test_merging_halves_is_one_run_in_whatever_order(tmp_path: Path) -> None:
    parts = [measured(IDS[start : start + 20]).save(tmp_path / str(start)) for start in (0, 20)]
    orders = [(Measurements.load(a), Measurements.load(b)) for a, b in (parts, parts[::-1])]
    one, other = (first.merge(second) for first, second in orders)
    assert one.save(tmp_path / "ab").read_bytes() == other.save(tmp_path / "ba").read_bytes()
    whole = measured()
    assert_same(one, whole)
    assert one.sufficiency() == whole.sufficiency()


def without_halves(found: Measurements) -> Measurements:
    return Measurements.of_tensors(found.info, whole_of(found.with_folds()))


def test_files_without_halves_merge_and_say_so() -> None:
    old = without_halves(measured(IDS[:20]))
    assert not old.has_halves
    both = measured(IDS[20:]).merge(old)
    assert_same(both, measured())
    assert not both.has_halves
    with pytest.raises(MeasurementsError) as error:
        both.sufficiency()
    assert "halves of it were not measured apart" in str(error.value)
    assert "measure again" in str(error.value)


def stopped_at(**options: Any) -> int:
    found = measured(num_samples=40, **options)
    assert found.info is not None
    assert found.info.is_complete
    assert_same(found, measured(IDS[: len(found.info.samples)], batch_size=options["batch_size"]))
    return len(found.info.samples)


@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_run_stops_at_the_first_point_where_the_data_suffices(batch_size: int) -> None:
    assert stopped_at(until_stable=LOOSE, batch_size=batch_size) == 16
    assert stopped_at(until_stable=STRICT, batch_size=batch_size) == 40
    share = {n: measured(IDS[:n]).sufficiency(0.2) for n in (16, 24, 32)}
    expected = next((n for n, found in share.items() if found.is_sufficient), 40)
    assert stopped_at(until_stable=0.2, batch_size=batch_size) == expected


class Killed(BaseException):
    """Nothing that anybody expects."""


@pytest.mark.parametrize("kills", [(5,), (16,), (3, 16, 20)])
def test_a_run_that_was_killed_stops_where_it_would_have(
    kills: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it was killed after the last batch before a point where it stops."""
    suffices_at = 24
    is_sufficient = property(lambda self: self.samples >= suffices_at)
    monkeypatch.setattr(sufficiency.Sufficiency, "is_sufficient", is_sufficient)
    options = {"until_stable": True, "save_every": 0, "output_file": tmp_path / "m"}
    save = PartialFile.save
    for kill in kills:

        def killed(
            self: PartialFile, info: Any, tensors: Any, number: int, kill: int = kill
        ) -> None:
            save(self, info, tensors, number)
            if number == kill:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(PartialFile, "save", killed)
            with pytest.raises(Killed):
                measured(**options)
    found = measured(**options)
    assert_same(found, measured(IDS[:24]))
    with pytest.raises(ConfigurationError, match="until_stable was"):
        _other_tolerance(tmp_path, save, monkeypatch)


def _other_tolerance(tmp_path: Path, save: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"save_every": 0, "output_file": tmp_path / "n"}

    def killed(self: PartialFile, info: Any, tensors: Any, number: int) -> None:
        save(self, info, tensors, number)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "save", killed)
        with pytest.raises(Killed):
            measured(until_stable=0.1, **options)
    measured(until_stable=0.2, **options)


def test_idle_experts_are_named() -> None:
    model = rank_jobs.routed_mixtral()
    data = rank_jobs.routed_texts(*(0, 1, 2) * 12)  # nobody sees the fourth
    found = calipers.measure(model, data, progress=False, until_stable=LOOSE)
    told = found.sufficiency(LOOSE)
    idle = {f"model.layers.0.mlp.experts.3.{name}_proj.input" for name in ("gate", "down")}
    assert not told.is_sufficient
    assert told.needed_samples is None
    assert any("experts.3." in name for name in told.unseen)
    assert not any(f"experts.{seen}." in name for name in told.unseen for seen in (0, 1, 2))
    unseen = {name for each in told.tensors if each.tensor in told.unseen for name in each.readers}
    assert unseen >= idle
    assert told.worst[0].tensor in told.unseen
    assert len(found.info.samples) == 36  # type: ignore[union-attr]


def test_movements_are_those_of_brute_force() -> None:
    """One tensor, whose typical movement is its own: the prior only multiplies it."""
    found = measured()
    place = ("model.layers.1.mlp.down_proj", "input")
    one = found.tensors()[place], found.halves()[place]
    told = sufficiency.sufficiency_of([((".".join(place),), *one)], 40, 0.05).tensors[0]
    factor = ((1 + 2 / 0.6745**2) / 3) ** 0.5
    n = [len(half(number)) for number in (0, 1)]
    part = (n[0] * n[1]) ** 0.5 / sum(n)
    alone = [measured(half(number)).tensors()[place] for number in (0, 1)]

    def values(name: str, key: str) -> list[torch.Tensor]:
        return [getattr(each[key], name).double() for each in alone]

    low, high = values("min_vals", "extrema"), values("max_vals", "extrema")
    sizes = [float(max(-a.min(), b.max())) for a, b in zip(low, high, strict=True)]
    growth = abs(sizes[0] - sizes[1]) / 2 / max(sizes)
    assert told.minmax == pytest.approx(growth * factor, rel=1e-5)
    shares = [each / each.sum() for each in values("_imatrix_sum", "squares")]
    moved = float((shares[0] - shares[1]).abs().sum()) * part
    assert told.importance == pytest.approx(moved * factor, rel=1e-5)
    scales = [best_int8_scale(each["counts"]) for each in (*alone, one[0])]
    assert told.mse == pytest.approx(
        abs(scales[0] - scales[1]) * part / scales[2] * factor, abs=2e-3
    )


def best_int8_scale(counts: Any) -> float:
    """Try many scales."""
    values, numbers = next(counts.distributions())
    most = float(values.abs().max()) / 127.5
    scales = most * torch.linspace(0.3, 1.05, 6000, dtype=torch.float64)
    errors = [
        ((values - (values / s).round().clamp(-128, 127) * s) ** 2 * numbers).sum() for s in scales
    ]
    return float(scales[int(torch.stack(errors).argmin())])


def test_what_is_said_of_it() -> None:
    movements = {"minmax": 0.01, "mse": 0.04, "importance": None}
    tensor = sufficiency.TensorSufficiency(
        "<a>", ("<a>",), 8, (4, 4), **movements, is_sufficient=False
    )
    told = sufficiency.Sufficiency((tensor,), 100, 0.05)
    assert told.needed_samples == 256  # 100 · (2 · 0.04 / 0.05)²
    growing = sufficiency.TensorSufficiency("b", ("b",), 8, (4, 4), 0.2, 0.0, 0.0, False)
    assert sufficiency.Sufficiency((growing,), 100, 0.05).needed_samples is None
    still = sufficiency.TensorSufficiency("c", ("c",), 8, (4, 4), 0.0, 0.0, 0.0, True)
    idle = sufficiency.TensorSufficiency("d", ("d",), 4, (4, 0), None, None, None, False)
    assert sufficiency.Sufficiency((still,) * 40 + (growing,), 100, 0.05).is_sufficient
    assert not sufficiency.Sufficiency((still,) * 40 + (idle,), 100, 0.05).is_sufficient
    assert "&lt;a&gt;" in told._repr_html_()
    data = told.as_dict()
    assert data["tensors"][0]["half_tokens"] == [4, 4]
    assert (data["share"], data["worst"], data["needed_samples"]) == (0.0, ["<a>"], 256)


@pytest.mark.parametrize("wrong", [0, -0.1, "0.1", float("nan"), float("inf")])
def test_tolerances_that_are_none(wrong: Any) -> None:
    for call in (
        lambda: calipers.measure("nowhere", IDS, until_stable=wrong),
        lambda: measured(IDS[:2]).sufficiency(wrong),
    ):
        with pytest.raises(ConfigurationError, match=r"a number above 0, such as 0\.1"):
            call()
