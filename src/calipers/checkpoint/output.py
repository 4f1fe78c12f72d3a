"""Output folders, complete or not there: written beside their place, then moved into it.

A journal lists the files that are finished, so that a run which goes on does not make them again.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from calipers.checkpoint.auxiliary_files import foreign_files, is_quantized
from calipers.errors import (
    CalipersError,
    CalipersWarning,
    CheckpointError,
    CheckpointExistsError,
    Option,
    cannot_write,
    inside_source,
    shortened,
    would_replace,
)
from calipers.files.reading import read_json_object
from calipers.files.writing import (
    SUFFIX,
    LockedFolder,
    check_ancestor,
    nearest_ancestor,
    output_exists,
    parents_made,
    paths_of,
    sync,
    sync_folder,
    work_folder,
)

NAME = "journal.json"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_POSSIBLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def check_output(
    directory: str | os.PathLike[str],
    overwrite: bool = False,
    inputs: Mapping[str, object] | None = None,
) -> Path:
    """Return the absolute path of an output folder, or say why it cannot be written.

    Call it before hours of work; nothing is made or changed, but that what processes which died
    have left beside the folder is put right.

    :param overwrite: whether a checkpoint (or an empty folder) that is there may be replaced
    :param inputs: what the checkpoint is made from, by what messages call it; where that is a path,
        it is never replaced. Nothing is written into the folder of a ``model``
    """
    path = Path(os.path.realpath(directory))
    if path.is_symlink():
        raise cannot_write(path, "it is a link that leads to itself")
    if path.exists() and not path.is_dir():
        raise cannot_write(path, "it is a file")
    sources = paths_of(inputs)
    if "model" in sources and sources["model"] in path.parents:
        raise inside_source(path, sources["model"])
    restore_outputs(path.parent)
    check_ancestor(path, cannot_write)
    if path.is_dir():
        if not overwrite:
            raise output_exists(f"The output folder '{path}'")
        with suppress(FileNotFoundError):  # somebody is just replacing it
            _check_replaceable(Path(directory), path, sources)
    return path


def _check_replaceable(given: Path, path: Path, sources: Mapping[str, Path]) -> None:
    """Refuse to replace what is more than a checkpoint, or in use, or given as a link."""
    for what, source in sources.items():
        if path in (source, *source.parents):
            raise would_replace(path, source, what)
    with suppress(FileNotFoundError):
        here = Path.cwd().resolve()
        if path in (here, *here.parents):
            problem = "it is the current folder, or holds it, and would be replaced under your feet"
            raise cannot_write(path, problem)
    foreign = foreign_files(path)
    if foreign or (os.listdir(path) and not is_quantized(path)):
        if foreign:
            problem = f"what is in it does not all belong to a checkpoint: {shortened(foreign, 3)}"
            advice = "move these away"
        else:
            problem = (
                "neither calipers.json nor a quantization_config in config.json says that a "
                "quantized checkpoint was written there"
            )
            advice = "remove it yourself"
        raise CheckpointExistsError(
            f"is not replaced: {problem}",
            subject=f"The output folder '{path}'",
            hint=Option("overwrite", True)
            + " replaces quantized checkpoints and empty folders only. Choose another folder, or "
            + f"{advice}.",
        )
    if given.is_symlink():
        problem = f"it is a link, and what it leads to, '{path}', would be replaced"
        raise cannot_write(given, problem)


def free_space(path: Path) -> int:
    """Return the free bytes of the disk that a folder is on, or would be on."""
    return shutil.disk_usage(nearest_ancestor(path)).free


@contextmanager
def output_folder(
    directory: str | os.PathLike[str],
    overwrite: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> Iterator[Journal]:
    """Give a temporary folder that is moved to its place if the block ends well, else removed.

    An old checkpoint changes places with the new one, and is then removed. Another process that
    writes to the same place is waited for. What the journal lists as finished stays if the process
    dies, and after Ctrl-C, for a later run to go on with; other errors remove it.

    :param arguments: what a run must have in common with this one to go on; None: none goes on
    """
    path = check_output(directory, overwrite)
    try:
        with parents_made(path), _work_beside(path, arguments) as journal:
            new = journal.folder
            work = new.parent
            yield journal
            for root, _, files in os.walk(new):
                for name in files:
                    sync(Path(root) / name)
                sync(Path(root))
            _remove_journal(work)  # it is about to be something else than an unfinished checkpoint
            check_output(path, overwrite)  # somebody may have come in between
            if not path.exists():
                os.rename(new, path)
            elif not _swap_at_once(new, path):
                # For a moment the old checkpoint has no other name: who stops then moves it back.
                os.rename(path, work / "old")
                os.rename(new, path)
                os.rename(work / "old", new)
            _sync_move(work, path)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"Writing the checkpoint '{path}' failed: {error.strerror or error}",
            hint="What was written has been removed again; the model is unchanged, and can be "
            "written to another folder.",
        ) from error


@contextmanager
def _work_beside(path: Path, arguments: Mapping[str, Any] | None) -> Iterator[Journal]:
    """Own a hidden folder on the same disk: ``new`` in it is removed at the end, ``old`` put back.

    That is right after success, after a failure, and when the process died and the next one takes
    over: after an exchange ``new`` is the old checkpoint.
    """
    owned = LockedFolder.claim(work_folder(path))
    journal = Journal(owned.path, owned.path / "new", arguments or {})
    try:
        if arguments is not None and journal.load():
            finished = {shard.file for shard in journal.shards}
            for file in journal.folder.iterdir():
                if file.name not in finished:
                    file.unlink()
        else:
            _settle(owned.path, path)
            journal.folder.mkdir()
        yield journal
        try:
            _settle(owned.path, path)
        except OSError as error:
            warnings.warn(
                f"The new checkpoint stands, but the old one could not be removed: {error}. "
                f"Remove '{owned.path}' yourself.",
                CalipersWarning,
                stacklevel=4,
            )
    except BaseException as error:
        if isinstance(error, Exception) or not _has_journal(owned.path):
            with suppress(OSError):
                _settle(owned.path, path)
        raise
    finally:
        owned.release()


def _settle(work: Path, path: Path) -> None:
    """Put an old checkpoint back if nothing is in its place, and remove what else there is."""
    old, new = work / "old", work / "new"
    _remove_journal(work)
    if old.exists() and not os.path.lexists(path):
        os.rename(old, path)
        _sync_move(work, path)
    for superfluous in (new, old):
        if superfluous.exists():
            # What is half removed is always called new: that is never put back.
            os.rename(superfluous, new)
            new.unlink() if new.is_file() else shutil.rmtree(new)


def restore_outputs(folder: Path) -> None:
    """Settle what processes that died have left in a folder."""
    for work in folder.glob(f".*{SUFFIX}"):
        with suppress(OSError):
            owned = LockedFolder.take_over(work)
            if owned is not None:
                try:
                    if not _has_journal(work):
                        _settle(work, folder / work.name[1 : -len(SUFFIX)])
                finally:
                    owned.release()


def _sync_move(*paths: Path) -> None:
    """Let moves last; what was moved is whole in any case, also where folders cannot be synced."""
    for folder in {path.parent for path in paths} | set(paths):
        sync_folder(folder)


@dataclass(frozen=True)
class FinishedShard:
    """A file of tensors.

    :param size: bytes of the tensors
    :param length: bytes of the file
    """

    file: str
    tensors: list[str]
    size: int
    length: int


class Journal:
    """A file beside the folder of an unfinished checkpoint; it is written whole each time.

    :param arguments: what two runs must have in common for the second one to go on, as plain data
    """

    def __init__(self, work: Path, folder: Path, arguments: Mapping[str, Any]) -> None:
        self._file, self.folder, self._arguments = work / NAME, folder, dict(arguments)
        self.shards: list[FinishedShard] = []
        self.state: dict[str, Any] = {}

    @property
    def tensors(self) -> set[str]:
        """The names of all tensors in finished files."""
        return {name for shard in self.shards for name in shard.tensors}

    def load(self) -> bool:
        """Read what an earlier run has finished; False if it is damaged, or of other arguments."""
        with suppress(OSError, CalipersError, TypeError, KeyError):
            content = read_json_object(self._file)
            shards = [FinishedShard(**shard) for shard in content["shards"]]
            for shard in shards:  # a file was on disk before it was noted
                path = self.folder / shard.file
                if path.parent != self.folder or path.stat().st_size != shard.length:
                    return False
            if content["arguments"] == self._arguments:
                self.shards, self.state = shards, dict(content["state"])
                return True
        return False

    def add(self, shard: FinishedShard, state: Mapping[str, Any]) -> None:
        """Note that a file is finished, with what a run needs to go on, as plain data."""
        sync(self.folder / shard.file)
        self.shards.append(shard)
        content = {
            "arguments": self._arguments,
            "shards": list(map(asdict, self.shards)),
            "state": dict(state),
        }
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(content), encoding="utf-8")
        sync(new)
        os.replace(new, self._file)
        sync_folder(self._file.parent)


def _remove_journal(work: Path) -> None:
    """Let no later run go on with what is in a folder."""
    for name in (NAME, "journal.new"):
        (work / name).unlink(missing_ok=True)


def _has_journal(work: Path) -> bool:
    """Whether a later run may go on with what is in a folder."""
    return (work / NAME).is_file()


def _swap_at_once(one: Path, other: Path) -> bool:
    """Exchange two folders with one call of the system; False if it, or the disk, cannot."""
    if not hasattr(os, "uname") or os.uname().sysname != "Linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_POSSIBLE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
