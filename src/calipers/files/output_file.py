"""An output file that is complete or not there: written aside, then moved into its place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

from calipers.errors import (
    CheckpointError,
    CheckpointExistsError,
    Option,
    cannot_write_file,
    file_in_use,
)
from calipers.files.locked_folder import LockedFolder

SUFFIX = ".calipers"
"""Of the hidden folder in which something is written, beside the place where it goes."""

PARTIAL = ".partial"
"""Of the file, beside an output, of a run that is not finished."""

Bytes: TypeAlias = "bytes | memoryview"


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
        _tidy(path)
    ancestor = nearest_ancestor(path)
    if not ancestor.is_dir():
        raise cannot_write_file(path, f"'{ancestor}' is a file")
    if not os.access(ancestor, os.W_OK | os.X_OK):
        raise cannot_write_file(path, f"'{ancestor}' is not writable")
    if path.exists():
        for what, place in (inputs or {}).items():
            if isinstance(place, (str, os.PathLike)) and os.path.exists(place):
                source = Path(os.path.realpath(place))
                if source in (path, *path.parents):
                    raise file_in_use(path, source, what)
        if not overwrite:
            raise _exists(path)
    return path


def _tidy(path: Path) -> None:
    """Remove what a process that died while it wrote a file has left; a living one is let alone."""
    work = _work(path)
    owned = LockedFolder.take_over(work) if work.exists() else None
    if owned is not None:
        (work / "new").unlink(missing_ok=True)
        owned.release()


def _work(path: Path) -> Path:
    return path.parent / f".{path.name}{SUFFIX}"


def _exists(path: Path) -> CheckpointExistsError:
    return CheckpointExistsError(
        "exists already. Nothing was written",
        subject=f"The output file '{path}'",
        hint="Choose another one, or pass " + Option("overwrite", True) + " to replace it.",
    )


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
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            owned = LockedFolder.claim(_work(path))
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise cannot_write_file(path, error.strerror or str(error)) from error
        try:
            place = OutputFile(path, owned.path)
            (owned.path / "new").unlink(missing_ok=True)
            yield place
        finally:
            owned.release()
    except BaseException:
        for folder in made:
            with suppress(OSError):
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
