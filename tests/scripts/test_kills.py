"""A process that is killed at any of its calls leaves the old or the new checkpoint, whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import killing
import pytest
from killing import checkpoint, load_script, state, write

from calipers.checkpoint.output import check_output, output_folder, restore_outputs
from calipers.errors import CalipersWarning, CheckpointError, CheckpointExistsError
from calipers.files import writing
from calipers.files.writing import LockedFolder, remove_scratch, scratch_folder

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Waiting for:calipers.errors.CalipersWarning"),
]


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script()


def forbid_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(killing.AT_ONCE, lambda *_: False)


@pytest.mark.parametrize(
    "how", [["old"], ["old", "renames"], []], ids=["exchange", "renames", "new"]
)
@pytest.mark.slow
def test_at_every_call_to_the_file_system(tmp_path: Path, how: list[str]) -> None:
    command = [sys.executable, killing.__file__, str(tmp_path), *how]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    assert len(found) > 20
    before = "old" if "old" in how else "nothing"
    gap = {"nothing"} if "renames" in how else set()  # until the next start
    at_first, restored, *others = zip(*found, strict=True)
    assert set(at_first) == {before, "new"} | gap
    assert others == [(".out.mine",) * len(found)]
    changes = [now for now, last in zip(restored, (None, *restored), strict=False) if now != last]
    assert changes == [before, "new"]  # never back, never another


def test_the_next_start_restores(script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    forbid_exchange(monkeypatch)
    out, rename = tmp_path / "out", os.rename
    checkpoint(out, "old")

    def killed(source: Path, target: Path) -> None:
        rename(source, target)
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch("os.rename", killed):
        script.run_child(lambda: write(out))
    assert not out.exists()
    with pytest.raises(CheckpointExistsError, match="exists already"):
        check_output(out)
    assert (state(out), os.listdir(tmp_path)) == ("old", ["out"])


def test_a_removal_that_was_cut_short_is_never_put_back(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_exchange(monkeypatch)
    out = tmp_path / "out"
    checkpoint(out, "old")

    rename = os.rename

    def killed(source: Path, target: Path) -> None:
        rename(source, target)
        if Path(target) == out:
            os.kill(os.getpid(), signal.SIGKILL)

    def cut_short(folder: Path) -> None:
        next(iter(Path(folder).iterdir())).unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch("os.rename", killed):
        script.run_child(lambda: write(out))
    with mock.patch("shutil.rmtree", cut_short):
        script.run_child(lambda: restore_outputs(tmp_path))
    assert state(out) == "new"
    out.rename(tmp_path / "moved")  # by the user, before the next start
    restore_outputs(tmp_path)
    assert os.listdir(tmp_path) == ["moved"]


# Owners


def test_the_folder_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    with output_folder(tmp_path / "out") as journal:
        folder = journal.folder
        (folder / "config.json").write_text("{}")
        restore_outputs(tmp_path)
        assert (folder / "config.json").exists()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("owner", "lives"),
    [
        ({}, True),
        ({"host": "elsewhere"}, True),
        ({"started": "0"}, False),
        ({"process": 2**22 + 1}, False),
    ],
)
def test_without_locks_an_owner_lives_if_its_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: dict[str, Any], lives: bool
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(writing.fcntl, "flock", no_locks)
    LockedFolder.claim(tmp_path / ".out.calipers")
    (tmp_path / ".out.calipers" / "new").mkdir()
    lock = tmp_path / ".out.calipers" / "lock"
    record = json.loads(lock.read_text())
    record["calipers"] |= owner
    lock.write_text(json.dumps(record))
    restore_outputs(tmp_path)
    assert lock.exists() is lives


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_what_calipers_has_not_made_is_left_alone(tmp_path: Path, what: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "new").mkdir()
    there = tmp_path / ".out.calipers"
    {
        "folder": lambda: (tmp_path / "mine").rename(there),
        "file": lambda: there.write_text("mine"),
        "link": lambda: there.symlink_to(tmp_path / "mine"),
    }[what]()
    before = sorted(tmp_path.rglob("*"))
    restore_outputs(tmp_path)
    with pytest.raises(CheckpointError, match=r"\.calipers': something is there that Calipers has"):
        write(tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


# Several processes


def write_while_another_waits(out: Path) -> None:
    second = threading.Thread(target=write, args=(out, "second"))
    with output_folder(out, overwrite=True) as journal:
        folder = journal.folder
        checkpoint(folder, "first")
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert not out.exists()
    second.join()


def test_who_writes_to_the_same_place_is_waited_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.warns(CalipersWarning, match=rf"Waiting for process {os.getpid()} on .* remove '"):
        write_while_another_waits(out)
    assert (state(out), os.listdir(tmp_path)) == ("second", ["out"])


def test_many_writers_never_make_a_torn_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write_often(text: str) -> None:
        for _ in range(20):
            write(out, text)

    children = []
    for text in ("one", "two"):
        child = os.fork()
        if child == 0:
            try:
                write_often(text)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert state(out) in ("one", "two")
    assert os.listdir(tmp_path) == ["out"]


# Other temporary folders


def test_weights_that_a_dead_process_left_are_removed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "calipers-weights-mine").mkdir()
    (tmp_path / "calipers-weights-mine" / "file").touch()

    def die() -> None:
        (scratch_folder().path / "ct_disk_cache.safetensors").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    script.run_child(die)
    assert len(os.listdir(tmp_path)) == 2
    one, other = scratch_folder(), scratch_folder()
    (other.path / "ct_disk_cache.safetensors").touch()
    assert set(tmp_path.iterdir()) == {one.path, other.path, tmp_path / "calipers-weights-mine"}
    remove_scratch(one)
    remove_scratch(other)
    assert os.listdir(tmp_path) == ["calipers-weights-mine"]
