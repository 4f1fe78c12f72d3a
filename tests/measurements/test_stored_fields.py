"""Statistics of a file are read as they are needed, whichever compressed-tensors wrote it."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from measuring import assert_same
from safetensors.torch import save_file
from torch import Tensor

from calipers import Measurements
from calipers.errors import MeasurementsError
from calipers.measurements import MeasurementsInfo
from calipers.measurements.file_format import OpenFile
from calipers.measurements.tensors import STATISTICS
from calipers.statistics.base import Reduction, Statistic
from calipers.statistics.sums import BlockHessians
from calipers.statistics.value_counts import ValueCounts

INFO = MeasurementsInfo("Model", "f" * 64, ("0" * 16,), 20)
INPUTS = torch.randn(20, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two modules with one input, of which there are a Hessian and counts."""
    hessian, counts = BlockHessians(24), ValueCounts()
    for each in (hessian, counts):
        each.update(INPUTS)
    known: dict[str, Statistic] = {"hessian": hessian, "counts": counts}
    tensors = {("q", "input"): known, ("k", "input"): known}
    return Measurements.of_tensors(INFO, tensors).save(tmp_path / "m.safetensors")


def hessian_of(seen: Measurements, module: str = "q") -> BlockHessians:
    found = seen.get(module, "input", "hessian")
    assert isinstance(found, BlockHessians)
    return found


def test_fields_are_read_again_once_nobody_holds_them(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, reads, read = Measurements.load(file), list[tuple[int, ...]](), OpenFile.read

    def counting(self: OpenFile, stored: Any) -> Any:
        reads.append(stored.shape)
        return read(self, stored)

    monkeypatch.setattr(OpenFile, "read", counting)
    assert [seen.tokens(module) for module in ("q", "k")] == [20, 20]
    assert seen.digest() == Measurements.load(file).digest()
    reads.clear()
    held = hessian_of(seen).hessians[0]
    assert held.data_ptr() == hessian_of(seen, "k").hessians.data_ptr()  # factorised once for both
    expected = INPUTS.double().T @ INPUTS.double()
    torch.testing.assert_close(held, expected, rtol=1e-5, atol=1e-5)
    assert reads == [(1, 24, 24)]
    del held
    assert hessian_of(seen).hessians.shape == (1, 24, 24)
    assert reads == [(1, 24, 24)] * 2


def test_what_is_derived_of_it_stays_in_the_file(file: Path) -> None:
    seen, narrow = Measurements.load(file), BlockHessians(8)
    assert narrow.derive_from([hessian_of(seen)])
    assert list(narrow.deferred()) == ["_hessian_sum"]
    whole = hessian_of(seen).hessians[0]
    for block, start in zip(narrow.hessians, (0, 8, 16), strict=True):
        assert torch.equal(block, whole[start : start + 8, start : start + 8])


def test_a_statistic_of_a_file_goes_on_like_any_other(file: Path) -> None:
    fresh = BlockHessians(24)
    for _ in range(2):
        fresh.update(INPUTS)
    mine = hessian_of(Measurements.load(file))
    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert not other.deferred()
        assert torch.equal(other.hessians, mine.hessians)
    mine.update(INPUTS)
    assert torch.equal(mine.hessians, fresh.hessians)
    assert not mine.deferred()
    mine.reset()
    assert mine.fields() == {}


def test_a_file_that_takes_its_place_does_not_matter_and_one_that_changes_does(file: Path) -> None:
    seen, expected = Measurements.load(file), hessian_of(Measurements.load(file)).hessians
    other = file.with_name("other")
    other.write_bytes(b"nothing of it")
    content = file.read_bytes()
    os.replace(other, file)
    assert torch.equal(hessian_of(seen).hessians, expected)

    file.write_bytes(content)
    seen = Measurements.load(file)
    with file.open("r+b") as opened:
        opened.truncate(len(content) - 8)
    with pytest.raises(MeasurementsError, match="has been changed since it was opened"):
        hessian_of(seen).hessians  # noqa: B018


@pytest.mark.parametrize(
    ("tensor", "channels"),
    [
        # as compressed-tensors 0.19 dumps its arguments, and as 0.20 does
        (
            {"group_size": None, "strategy": "tensor", "block_structure": None},
            {"group_size": 1, "strategy": "group", "block_structure": None},
        ),
        ({"group_size": None, "strategy": "tensor"}, {"group_size": 1, "strategy": "group"}),
        ({"strategy": "tensor"}, {"strategy": "group", "group_size": 1}),
    ],
    ids=["0.19", "0.20", "least"],
)
def test_files_of_any_version_of_compressed_tensors(
    tensor: dict[str, Any], channels: dict[str, Any], tmp_path: Path
) -> None:
    fields = {
        "min_vals": torch.tensor([-1.0]),
        "max_vals": torch.tensor([2.0]),
        "observed_tokens": torch.tensor(20),
        "observed_nonfinite": torch.tensor(0),
        "observed_like": torch.empty(0),
    }
    wide = {"min_vals": torch.tensor([-1.0, 0.5]), "max_vals": torch.tensor([1.0, 2.0])}
    stored, statistics = dict[str, torch.Tensor](), dict[str, Any]()
    for key, cut, values in (
        ("extrema", tensor, fields),
        ("channel_extrema", channels, {**fields, **wide}),
    ):
        about = {"class": "Extrema", "base_name": "input", **cut, "nonfinite": "raise"}
        shapes = {name: list(value.shape) for name, value in values.items()}
        statistics[key] = {"configuration": about, "fields": shapes}
        stored |= {f"up.input/{key}.{name}": value.clone() for name, value in values.items()}
    header = {
        "format": "calipers.measurements",
        "version": 2,
        "calipers": "0.1.0",
        "complete": True,
        "run": {},
        "model": {"class": "Model", "fingerprint": "f" * 64},
        "samples": ["0" * 16],
        "tokens": 20,
        "tensors": {"up.input": {"readers": ["up.input"], "statistics": statistics}},
    }
    text = json.dumps(header)
    digest = hashlib.sha256(text.encode())
    for name in sorted(stored):
        code = {"int64": "I64", "float32": "F32"}[str(stored[name].dtype).removeprefix("torch.")]
        digest.update(f"{name} {code} {list(stored[name].shape)}\n".encode())
        digest.update(stored[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    save_file(stored, tmp_path / "by-hand", {"calipers": text, "sha256": digest.hexdigest()})
    seen = Measurements.load(tmp_path / "by-hand")
    for key, cut in (("extrema", tensor), ("channel_extrema", channels)):
        found = seen.get("up", "input", key)
        assert found is not None
        assert found.configuration() == {
            "class": "Extrema",
            "base_name": "input",
            "group_size": cut.get("group_size"),
            "strategy": cut["strategy"],
            "block_structure": None,
            "nonfinite": "raise",
        }
    assert_same(Measurements.load(seen.save(tmp_path / "again")), seen)


class Sums(Statistic):
    """Σx of each channel: a statistic of a package, whose fields have names of their own."""

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "total": Reduction.SUM,
        "count": Reduction.SUM,
    }
    tokens_field = "count"

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        tokens = x if mask is None else x[mask]
        self.absorb(total=tokens.sum(0), count=torch.tensor(len(tokens)))


def test_statistics_of_packages_are_read_by_what_they_declare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(STATISTICS, "_sources", {**STATISTICS._sources})
    STATISTICS.add(Sums)
    sums = Sums()
    sums.update(-INPUTS)
    seen = Measurements.of_tensors(INFO, {("q", "input"): {"sums": sums}})
    again = Measurements.load(seen.save(tmp_path / "m.safetensors"))
    assert_same(again, seen)
    sums.total[3] = torch.inf
    seen.save(tmp_path / "damaged.safetensors")
    with pytest.raises(MeasurementsError, match="sums: total must be finite"):
        Measurements.load(tmp_path / "damaged.safetensors")
