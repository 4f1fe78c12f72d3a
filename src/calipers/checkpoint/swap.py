"""Two folders change places, at once where the system can do that."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_POSSIBLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


def swap_folders(one: Path, other: Path, aside: Path) -> None:
    """Let two folders on one disk change places.

    Where the system cannot do it at once, ``other`` is under no name but ``aside`` for a moment:
    whoever stops in that moment has to move it back.
    """
    if not _swap_at_once(one, other):
        os.rename(other, aside)
        os.rename(one, other)
        os.rename(aside, one)


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
