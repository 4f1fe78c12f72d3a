"""Folders that belong to a process while it lives, so that what a dead one left can be told."""

from __future__ import annotations

import errno
import json
import os
import socket
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from calipers.errors import CalipersWarning, cannot_write

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_SCRATCH = "calipers-weights-"
_RECORD = 512  # bytes: a record is written over an older one in one piece


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
        told = False
        while True:
            with suppress(FileExistsError):
                path.mkdir(mode=0o700)
            owned = cls.take_over(path)
            if owned is not None:
                return owned
            if os.path.lexists(path) and not _is_ours(path):
                raise cannot_write(path, "something is there that Calipers has not made")
            if not told and path.exists():
                _tell_waiting(path)
                told = True
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
                _write_owner(descriptor)
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
        return not _may_live(_owner(lock))


def _is_at(descriptor: int, lock: Path) -> bool:
    """Whether a file that was opened is still there under its name."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(lock))
    return False


def _write_owner(descriptor: int) -> None:
    process = os.getpid()
    owner = {"host": socket.gethostname(), "process": process, "started": _started(process)}
    os.write(descriptor, json.dumps({"calipers": owner}).encode().ljust(_RECORD))


def _owner(lock: Path) -> dict[str, Any]:
    """Return who wrote a lock; nothing if it was not Calipers."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads(lock.read_bytes())["calipers"]
        return {key: owner[key] for key in ("host", "process", "started")}
    return {}


def _may_live(owner: dict[str, Any]) -> bool:
    if not owner:
        return False
    is_here = owner["host"] == socket.gethostname()
    return not is_here or bool(owner["started"] == _started(owner["process"]))


def _started(process: int) -> str | None:
    """Return when a process started, in the words of the system; None if that cannot be told."""
    with suppress(OSError, IndexError):
        # The second field is a name, which may hold anything.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def _tell_waiting(path: Path) -> None:
    owner = _owner(path / LOCK)
    who = f"process {owner['process']} on {owner['host']}" if owner else "another process"
    warnings.warn(
        f"Waiting for {who}, which writes to the same place. If that process is gone, remove "
        f"'{path / LOCK}'.",
        CalipersWarning,
        stacklevel=2,
    )
