"""Write files whole or not at all: aside, in a folder locked by its owner, then moved."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeAlias

from calipers.errors import (
    CalipersWarning,
    CheckpointError,
    CheckpointExistsError,
    Option,
    cannot_write,
    cannot_write_file,
    file_in_use,
)

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".calipers"
"""Of the hidden folder in which something is written, beside the place where it goes."""

PARTIAL = ".partial"
"""Of the file, beside an output, of a run that is not finished."""

Bytes: TypeAlias = "bytes | memoryview"

LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_SCRATCH = "calipers-weights-"
_RECORD = 512  # bytes: a record is written over an older one in one piece


def check_output_file(
    file: str | os.PathLike[str],
    overwrite: bool = False,
    inputs: Mapping[str, object] | None = None,
) -> Path:
    """Return the absolute path of an output file, or say why it cannot be written.

    Call it before hours of work; nothing is made or changed, but that what a process which died has
    left beside the file is removed.

    :param overwrite: whether a file that is there may be replaced
    :param inputs: what the file is made from, by what messages call it; where that is a path,
        neither it nor anything in it is replaced
    """
    path = Path(os.path.realpath(file))
    if path.is_symlink():
        raise cannot_write_file(path, "it is a link that leads to itself")
    if path.is_dir():
        raise cannot_write_file(path, "it is a folder")
    with suppress(OSError):
        work = work_folder(path)
        owned = LockedFolder.take_over(work) if work.exists() else None
        if owned is not None:  # its owner died; a living one is left alone
            (work / "new").unlink(missing_ok=True)
            owned.release()
    check_ancestor(path, cannot_write_file)
    if path.exists():
        for what, source in paths_of(inputs).items():
            if source in (path, *path.parents):
                raise file_in_use(path, source, what)
        if not overwrite:
            raise output_exists(f"The output file '{path}'")
    return path


def check_ancestor(path: Path, refusal: Callable[[object, str], CheckpointError]) -> None:
    """Refuse a path beneath which nothing can be created."""
    ancestor = nearest_ancestor(path)
    if not ancestor.is_dir():
        raise refusal(path, f"'{ancestor}' is a file")
    if ancestor == path or not os.access(ancestor, os.W_OK | os.X_OK):
        raise refusal(path, f"'{ancestor}' is not writable")


def output_exists(subject: str) -> CheckpointExistsError:
    """Return the error for an output that exists and may not be replaced."""
    return CheckpointExistsError(
        "exists already. Nothing was written",
        subject=subject,
        hint="Choose another one, or pass " + Option("overwrite", True) + " to replace it.",
    )


def paths_of(inputs: Mapping[str, object] | None) -> dict[str, Path]:
    """Return those inputs that are on disk, by what messages call them, without links."""
    return {
        what: Path(os.path.realpath(place))
        for what, place in (inputs or {}).items()
        if isinstance(place, (str, os.PathLike)) and os.path.exists(place)
    }


def work_folder(path: Path) -> Path:
    """Return the hidden folder in which an output is written."""
    return path.parent / f".{path.name}{SUFFIX}"


class OutputFile:
    """A place for a file, which belongs to this process: whoever else writes there waits."""

    def __init__(self, path: Path, work: Path) -> None:
        self.path, self._new = path, work / "new"

    def write(self, content: Iterable[Bytes], path: Path | None = None, *, overwrite: bool) -> None:
        """Write a file; it is there as a whole when this returns, or not at all.

        :param path: another file in the same folder, instead of that of this place
        """
        path = path or self.path
        try:
            with self._new.open("wb") as opened:
                for part in content:
                    opened.write(part)
                opened.flush()
                os.fsync(opened.fileno())
            check_output_file(path, overwrite)  # somebody may have come in between
            os.replace(self._new, path)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"Writing '{path}' failed: {error.strerror or error}",
                hint="What was written has been removed again. Choose a place on another disk, or "
                "free some space.",
            ) from error
        finally:
            with suppress(OSError):
                self._new.unlink(missing_ok=True)
        sync_folder(path.parent)


@contextmanager
def output_file(path: Path) -> Iterator[OutputFile]:
    """Own the place of a file; what a process that died has left there is removed."""
    with ExitStack() as stack:
        try:
            stack.enter_context(parents_made(path))
            owned = LockedFolder.claim(work_folder(path))
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise cannot_write_file(path, error.strerror or str(error)) from error
        stack.callback(owned.release)
        (owned.path / "new").unlink(missing_ok=True)
        yield OutputFile(path, owned.path)


@contextmanager
def parents_made(path: Path) -> Iterator[None]:
    """Make the folders around a path; if the block fails, those that it made are removed."""
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):  # somebody else has put something there
                folder.rmdir()
        raise


def nearest_ancestor(path: Path) -> Path:
    """Return the nearest folder around a path that exists; the path itself if none does."""
    return next((folder for folder in path.parents if folder.exists()), path)


def sync_folder(folder: Path) -> None:
    """Let moves in a folder last, where the system can do that."""
    with suppress(OSError):
        sync(folder)


def sync(path: Path) -> None:
    """Let what was written to a file or folder last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LockedFolder:
    """A folder with a lock file, which its owner keeps locked and which names the owner.

    The system unlocks the file when the owner dies, however that happens. Where a file system has
    no locks, the owner is dead if this machine has no such process.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor

    @classmethod
    def claim(cls, path: Path) -> LockedFolder:
        """Make a folder, or take over that of a dead process; a living one is waited for."""
        warned = False
        while True:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            owned = cls.take_over(path)
            if owned is not None:
                return owned
            if os.path.lexists(path) and not _is_ours(path):
                raise cannot_write(path, "something is there that Calipers has not made")
            if not warned and path.exists():
                owner = _owner(path / LOCK)
                who = (
                    f"process {owner['process']} on {owner['host']}" if owner else "another process"
                )
                warnings.warn(
                    f"Waiting for {who}, which writes to the same place. If that process is gone, "
                    f"remove '{path / LOCK}'.",
                    CalipersWarning,
                    stacklevel=2,
                )
                warned = True
            time.sleep(0.1)

    @classmethod
    def take_over(cls, path: Path) -> LockedFolder | None:
        """Take the folder of a dead process; None if its owner lives, or it is not one of ours."""
        if not _is_ours(path) or not path.is_dir():
            return None
        lock = path / LOCK
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except FileNotFoundError:  # it was just removed
            return None
        try:
            if _lock(descriptor, lock) and _is_at(descriptor, lock):
                pid = os.getpid()
                owner = {"host": socket.gethostname(), "process": pid, "started": _started(pid)}
                os.write(descriptor, json.dumps({"calipers": owner}).encode().ljust(_RECORD))
                return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Remove the folder if it is empty; otherwise the next one who comes may take it over."""
        try:
            if os.listdir(self.path) == [LOCK]:
                (self.path / LOCK).unlink()
                self.path.rmdir()
        except OSError:
            pass  # somebody else's file came in, or all is gone already
        finally:
            os.close(self._descriptor)


def scratch_folder() -> LockedFolder:
    """Make a folder for temporary files, and remove those that dead processes of this user left."""
    mine = LockedFolder.claim(Path(tempfile.mkdtemp(prefix=_SCRATCH)))
    user = mine.path.stat().st_uid
    for path in mine.path.parent.glob(f"{_SCRATCH}*"):
        with suppress(OSError):
            if path.lstat().st_uid == user:
                remove_scratch(LockedFolder.take_over(path))
    return mine


def remove_scratch(folder: LockedFolder | None) -> None:
    """Remove a folder for temporary files with all that is in it."""
    if folder is None:
        return
    for path in folder.path.iterdir():
        if path.is_dir() and not path.is_symlink():
            rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink(missing_ok=True)
    folder.release()


def _is_ours(path: Path) -> bool:
    """Whether a folder has a lock of ours, or is as young as to have nothing in it."""
    if path.is_symlink() or path.is_file():
        return False
    for _ in range(2):  # its owner may be making or removing it
        with suppress(FileNotFoundError):
            if os.listdir(path) in ([], [LOCK]) or _owner(path / LOCK):
                return True
    return not path.exists()


def _lock(descriptor: int, lock: Path) -> bool:
    """Lock a file; False if a living process has locked it."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "no locks")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        owner = _owner(lock)
        if not owner:
            return True
        is_here = owner["host"] == socket.gethostname()
        return is_here and bool(owner["started"] != _started(owner["process"]))


def _is_at(descriptor: int, lock: Path) -> bool:
    """Whether a file that was opened is still there under its name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(lock))
    return False


def _owner(lock: Path) -> dict[str, Any]:
    """Return who wrote a lock; nothing if it was not Calipers."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads(lock.read_bytes())["calipers"]
        return {key: owner[key] for key in ("host", "process", "started")}
    return {}


def _started(process: int) -> str | None:
    """Return when a process started, in the words of the system; None if that cannot be told."""
    with suppress(OSError, IndexError):
        # The second field is a name, which may hold anything.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return None
