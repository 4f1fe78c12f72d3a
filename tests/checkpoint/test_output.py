"""An output folder is complete or not there, whatever happens."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from frozen import freeze, llama, scheme
from transformers import PreTrainedModel

import calipers.checkpoint.output as output
from calipers.checkpoint.output import check_output, output_folder
from calipers.checkpoint.writer import write_checkpoint
from calipers.errors import CalipersWarning, CheckpointError, CheckpointExistsError


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return freeze(llama(), scheme("W4A16"))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A checkpoint that is there already."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("old")
    (folder / "calipers.json").write_text('{"calipers": "0.1.0"}')
    (folder / "model-00007-of-00009.safetensors").write_text("old")
    return folder


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def write_and_fail(path: Path, error: type[BaseException]) -> None:
    with output_folder(path, overwrite=True) as journal:
        folder = journal.folder
        (folder / "config.json").write_text("new")
        raise error


def test_a_folder_that_exists_is_refused(old: Path) -> None:
    with pytest.raises(CheckpointExistsError, match=r"'.*out' exists already\..*overwrite=True"):
        check_output(old)
    with pytest.raises(FileExistsError):
        check_output(old)
    assert check_output(old, overwrite=True) == old.resolve()


def test_an_empty_folder_is_refused_but_can_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(CheckpointExistsError, match="exists already"):
        check_output(tmp_path)
    check_output(tmp_path, overwrite=True)


def test_a_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text("precious")
    with pytest.raises(
        CheckpointExistsError, match=r"to a checkpoint: a, b, c and 1 more\. overwr"
    ):
        check_output(tmp_path, overwrite=True)
    assert contents(tmp_path) == set("abcd")


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file': it is a file\. Choose another"):
        check_output(tmp_path / "file", overwrite=True)
    with pytest.raises(CheckpointError, match=r"'.*file' is a file"):
        check_output(tmp_path / "file" / "out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_parent_that_is_not_writable_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="is not writable"):
        check_output(tmp_path / "out")
    tmp_path.chmod(0o700)


def test_a_parent_said_to_be_read_only_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match=r"out': '.*' is not writable"):
        check_output(tmp_path / "out")


def test_the_errors_share_an_exit_code() -> None:
    assert issubclass(CheckpointExistsError, CheckpointError)
    kinds = (CheckpointExistsError, CheckpointExistsError, CheckpointError, CheckpointError)
    assert {kind.exit_code for kind in (*kinds, CheckpointError)} == {7}


def test_nothing_is_seen_before_the_end(tmp_path: Path) -> None:
    with output_folder(tmp_path / "a" / "b" / "out") as journal:
        folder = journal.folder
        (folder / "file").write_text("new")
        assert not (tmp_path / "a" / "b" / "out").exists()
    assert contents(tmp_path) == {"a", "a/b", "a/b/out", "a/b/out/file"}


def write_while_another_does(path: Path) -> None:
    with output_folder(path):
        path.mkdir()
        (path / "config.json").write_text("theirs")


def test_a_folder_that_comes_in_between_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(CheckpointExistsError, match="exists already"):
        write_while_another_does(tmp_path / "out")
    assert contents(tmp_path) == {"out", "out/config.json"}


def test_permissions_are_those_of_any_new_folder(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    with output_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write_and_fail(tmp_path / "a" / "out", error)
    assert contents(tmp_path) == set()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_checkpoint(old: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        write_and_fail(old, error)
    assert contents(old.parent) == {
        "out",
        "out/calipers.json",
        "out/config.json",
        "out/model-00007-of-00009.safetensors",
    }
    assert (old / "config.json").read_text() == "old"


def test_an_old_checkpoint_is_replaced_as_a_whole(old: Path) -> None:
    with output_folder(old, overwrite=True) as journal:
        folder = journal.folder
        (folder / "config.json").write_text("new")
        assert (old / "config.json").read_text() == "old"
    assert contents(old.parent) == {"out", "out/config.json"}
    assert (old / "config.json").read_text() == "new"


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_the_old_checkpoint_comes_back_if_renaming_fails(
    old: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException
) -> None:
    monkeypatch.setattr("calipers.checkpoint.output._swap_at_once", lambda *_: False)
    rename, calls = os.rename, []

    def broken(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == failing:
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", broken)
    with (
        pytest.raises(
            (CheckpointError, KeyboardInterrupt), match=r"^$|out' failed: Input/output error"
        ),
        output_folder(old, overwrite=True) as journal,
    ):
        (journal.folder / "config.json").write_text("new")
    assert len(calls) >= failing
    assert (old / "config.json").read_text() == "old"
    assert [path.name for path in old.parent.iterdir()] == ["out"]


def test_an_old_checkpoint_that_cannot_be_removed_is_named(
    old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(output.shutil, "rmtree", refuse)
    with (
        pytest.warns(CalipersWarning, match=r"new checkpoint stands, but .* Remove '.*calipers'"),
        output_folder(old, overwrite=True) as journal,
    ):
        (journal.folder / "config.json").write_text("new")
    assert (old / "config.json").read_text() == "new"


def test_too_little_space_is_said_before_anything_is_written(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calipers.checkpoint.writer.free_space", lambda _: 100_000)
    with pytest.raises(
        CheckpointError, match=r"needs about 0\.\d{3} GB, but .* has 0\.000 GB free\. Nothing"
    ):
        write_checkpoint(model, tmp_path / "out", recipe="")
    assert contents(tmp_path) == set()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["os.fsync", "calipers.checkpoint.writer.Shard.finish"])
def test_a_disk_that_runs_full_leaves_nothing(
    model: PreTrainedModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    where: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(where, fail)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        write_checkpoint(model, tmp_path / "out", recipe="")
    if not isinstance(error, KeyboardInterrupt):
        assert "out' failed: No space left on device. What was written has" in str(caught.value)
    assert contents(tmp_path) == set()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(tmp_path)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("cannot mount a small disk here")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_real_disk_that_runs_full_leaves_nothing(
    model: PreTrainedModel, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="needs about"):
        write_checkpoint(model, small_disk / "out", recipe="")
    monkeypatch.setattr("calipers.checkpoint.writer.free_space", lambda _: 10**12)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_checkpoint(model, small_disk / "out", recipe="", max_shard_size="50KB")
    assert contents(small_disk) == set()
