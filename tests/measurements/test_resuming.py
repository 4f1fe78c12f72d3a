"""A run that was killed goes on where it was; what comes out is what one run would have found."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, saved, token_ids
from measuring import assert_same
from shell import PROGRAM, environment, run
from words import byte_tokenizer

import calipers
from calipers import Measurements
from calipers.engine import loop
from calipers.errors import CheckpointExistsError, ConfigurationError, MeasurementsError
from calipers.measurements.partial import PartialFile
from calipers.statistics.sums import BlockHessians

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

IDS = torch.cat([token_ids(7, 12), token_ids(1, 12)])  # the last is seen twice


class Killed(BaseException):
    """Nothing that anybody expects."""


def measure(file: Path, data: torch.Tensor = IDS, **options: Any) -> Measurements:
    collect = "hessian,outputs,sensitivity"
    options = {"collect": collect, "batch_size": 1, "save_every": 0, **options}
    return calipers.measure(build("llama"), data, output_file=file, progress=False, **options)


def killed_after(batches: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure until so many batches are written down."""
    real = PartialFile.save

    def save(self: PartialFile, info: Any, tensors: Any, number: int) -> None:
        real(self, info, tensors, number)
        if number == batches:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "save", save)
        with pytest.raises(Killed):
            measure(file)


def test_a_run_goes_on_with_what_it_has_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measure(tmp_path / "whole")
    file, partial = tmp_path / "m", tmp_path / "m.partial"
    sizes, basic = [], loop.PIPELINES["basic"]

    def counting(run: Any, batches: Any) -> Any:
        sizes.append(len(batches))
        return basic(run, batches)

    monkeypatch.setitem(loop.PIPELINES, "basic", counting)
    for done in (3, 5):
        killed_after(done, file, monkeypatch)
        seen = Measurements.load(partial)
        assert seen.info is not None
        assert not seen.info.is_complete
        assert (len(seen.info.samples), seen.info.tokens) == (done, done * 12)
        assert "not finished" in repr(seen)
    found = measure(file)
    assert sizes == [8, 5, 3]
    assert_same(found, whole)
    assert file.read_bytes() == (tmp_path / "whole").read_bytes()  # sums, too, to the bit
    assert sorted(os.listdir(tmp_path)) == ["m", "whole"]


def test_inputs_that_are_one_are_measured_once_by_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_after(3, tmp_path / "m", monkeypatch)
    updates, update = Counter[str](), BlockHessians.update

    def counting(self: BlockHessians, *args: Any, **kwargs: Any) -> None:
        updates[self.owner] += 1
        update(self, *args, **kwargs)

    monkeypatch.setattr(BlockHessians, "update", counting)
    measure(tmp_path / "m")
    layers = [owner for owner in updates if "layers.0" in owner]
    assert sorted(owner.rpartition(".")[2] for owner in layers) == [
        "down_proj",
        "gate_proj",
        "o_proj",
        "q_proj",
    ]
    assert set(updates.values()) == {5}


def test_stopping_points_do_not_change_sums(tmp_path: Path) -> None:
    ids = token_ids(30, 12)
    for name, tolerance in (("stops", 1e-9), ("whole", False)):
        measure(tmp_path / name, ids, num_samples=30, until_stable=tolerance)
    assert (tmp_path / "stops").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"batch_size": 2}, "batch_size was 1, and is 2 now"),
        ({"collect": ""}, "collect was ['hessian', 'outputs', 'sensitivity'], and is [] now"),
        ({"dtype": "bfloat16"}, "dtype was 'float32', and is 'bfloat16' now"),
        ({"data": IDS.flip(1)}, "data was '"),
    ],
)
def test_other_arguments_are_refused(
    options: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, partial = tmp_path / "m", tmp_path / "m.partial"
    killed_after(2, file, monkeypatch)
    before = partial.read_bytes()
    with pytest.raises(ConfigurationError) as error:
        measure(file, **options)
    assert f"The unfinished file '{partial}' is that of a run with other arguments: {text}" in str(
        error.value
    )
    assert "Give the same arguments to go on with that run, or remove the file to begin anew." in (
        str(error.value)
    )
    assert partial.read_bytes() == before
    assert os.listdir(tmp_path) == ["m.partial"]


def test_a_damaged_file_of_a_run_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, partial = tmp_path / "m", tmp_path / "m.partial"
    killed_after(2, file, monkeypatch)
    partial.write_bytes(partial.read_bytes()[:-3])
    with pytest.raises(MeasurementsError, match=r"If you remove it, the run begins anew\."):
        measure(file)


def test_a_run_that_was_killed_when_all_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, partial = tmp_path / "m", tmp_path / "m.partial"
    killed_after(8, file, monkeypatch)
    left = partial.read_bytes()
    measure(file)
    partial.write_bytes(left)
    with pytest.raises(CheckpointExistsError):
        measure(file)
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.slow
def test_a_killed_process(tmp_path: Path) -> None:
    """Real processes, a real SIGKILL; whenever it comes, the next one ends well."""
    folder = saved(build("llama tied", torch.bfloat16), tmp_path / "model")
    byte_tokenizer(bos=True, eos=True).save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} green bottles, and {i * i} more of them. " for i in range(300)))
    place = tmp_path / "place"
    place.mkdir()
    command = ["measure", str(folder), "--data", str(text), "--samples", "60", "--seq-len", "32"]
    whole = run(*command, "-o", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    command += ["-o", str(place / "m"), "--save-every", "0"]
    killed = 0
    for _ in range(2):
        process = subprocess.Popen(
            [*PROGRAM, *command], env=environment(), stderr=subprocess.DEVNULL
        )
        before = (place / "m.partial").stat().st_mtime_ns if killed else 0
        while process.poll() is None and not _is_newer(place / "m.partial", before):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        seen = Measurements.load(place / "m.partial").info
        assert seen is not None
        assert 0 < len(seen.samples) < 60
    assert killed == 2
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert (place / "m").read_bytes() == (tmp_path / "whole").read_bytes()
    assert os.listdir(place) == ["m"]


def _is_newer(path: Path, than: int) -> bool:
    return path.exists() and path.stat().st_mtime_ns > than
