"""Regular files alone are opened, and read whole only up to a size that memory can hold."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

LARGEST_JSON = 100_000_000
"""The largest JSON file that is read, in bytes; safetensors limits its own headers to as much."""

_KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def irregular_kind(path: str | os.PathLike[str]) -> str | None:
    """Return what a path leads to that is no regular file; None for one, and for nothing at all.

    >>> irregular_kind("/"), irregular_kind("no such file")
    ('a folder', None)
    """
    try:
        return _kind(os.stat(path).st_mode)
    except (OSError, ValueError):  # a name that is too long, or has a zero byte
        return None


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a regular file to read it.

    Whatever else a path leads to raises an ``OSError`` at once: opening a FIFO waits for a writer
    that may never come, and a device may never end.
    """
    kind = _kind(os.stat(path).st_mode)
    if kind is not None:
        raise OSError(errno.EINVAL, f"it is {kind}, and only regular files are read", str(path))
    return path.open("rb", buffering=buffering)


def read_whole(path: Path, most: int = LARGEST_JSON) -> bytes:
    """Return what a regular file holds; one of more than ``most`` bytes raises an ``OSError``."""
    with open_regular(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > most:
            problem = f"it has {size:,} bytes, and at most {most:,} of such a file are read"
            raise OSError(errno.EFBIG, problem, str(path))
        return opened.read(most)


def _kind(mode: int) -> str | None:
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")
