"""Read files: only regular ones, whole only up to a size that memory can hold, and JSON."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from calipers.errors import CalipersError, damaged_file

LARGEST_JSON = 100_000_000
"""The largest JSON file that is read, in bytes; safetensors limits its own headers to as much."""

_KINDS = {
    stat.S_IFIFO: "a pipe (FIFO)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}

Damaged = Callable[[object, str], CalipersError]
"""Makes the error that says what is wrong with a file."""


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


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; every key stands once, every text is text."""
    try:
        content = read_whole(file)
    except OSError as error:
        raise damaged_file(file, f"it cannot be read ({error.strerror})") from error
    return parse_json_object(content, file)


def parse_json_object(
    content: bytes, file: object, damaged: Damaged = damaged_file
) -> dict[str, Any]:
    """Return the object that some bytes are; ``file`` is what errors name."""
    try:
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=_without_doubles)
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # half a character cannot be written
    except UnicodeDecodeError as error:
        raise damaged(file, f"no UTF-8 text at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise damaged(file, "a text in it has half a character (a surrogate)") from error
    except RecursionError as error:
        raise damaged(file, "it is nested too deeply") from error
    except ValueError as error:
        raise damaged(file, f"no valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        kind = "nothing" if parsed is None else f"a {type(parsed).__name__}"
        raise damaged(file, f"it holds {kind}, not a JSON object")
    return parsed


def _without_doubles(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise ValueError(f"the key {key!r} stands twice")
        unique[key] = value
    return unique
