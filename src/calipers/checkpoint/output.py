"""An output folder that is complete or not there: written beside its place, then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from calipers.errors import (
    CalipersWarning,
    CheckpointError,
    CheckpointExistsError,
    CheckpointWriteError,
    NotACheckpointError,
    OutputPathError,
)


def check_output(directory: str | os.PathLike[str], overwrite: bool = False) -> Path:
    """Return the absolute path of an output folder, or say why it cannot be written.

    Call it before hours of work; nothing is made or changed.

    :param overwrite: whether a checkpoint (or an empty folder) that is there may be replaced
    """
    path = Path(directory).resolve()
    if path.exists() and not path.is_dir():
        raise OutputPathError(path, "it is a file")
    _check_ancestor(path)
    if path.is_dir():
        if not overwrite:
            raise CheckpointExistsError(path)
        found = os.listdir(path)
        if found and "config.json" not in found:
            raise NotACheckpointError(path, found)
    return path


def _check_ancestor(path: Path) -> None:
    ancestor = _nearest_ancestor(path)
    if not ancestor.is_dir():
        raise OutputPathError(path, f"'{ancestor}' is a file")
    if ancestor == path or not os.access(ancestor, os.W_OK | os.X_OK):
        raise OutputPathError(path, f"'{ancestor}' is not writable")


def _nearest_ancestor(path: Path) -> Path:
    return next((folder for folder in path.parents if folder.exists()), path)


def free_space(path: Path) -> int:
    """Return the free bytes of the disk that a folder is on, or would be on."""
    return shutil.disk_usage(_nearest_ancestor(path)).free


@contextmanager
def output_folder(directory: str | os.PathLike[str], overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary folder that takes its place when the block ends well, and goes when not.

    An old checkpoint is moved aside and removed only when the new one stands.
    """
    path = check_output(directory, overwrite)
    made = [folder for folder in path.parents if not folder.exists()]
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _folder_beside(path, "tmp")
        yield temporary
        _sync_tree(temporary)
        check_output(path, overwrite)  # somebody may have come in between
        _move_into_place(temporary, path)
    except BaseException as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError) and not isinstance(error, CheckpointError):
            raise CheckpointWriteError(path, error.strerror or error) from error
        raise


def _folder_beside(path: Path, kind: str) -> Path:
    """Make a folder on the same disk, with the permissions of any other new folder."""
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=f".{kind}", dir=path.parent))
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    return folder


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            _sync(Path(root) / name)
        _sync(Path(root))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _move_into_place(temporary: Path, path: Path) -> None:
    if not path.exists():
        os.rename(temporary, path)
        _sync(path.parent)
        return
    aside = _folder_beside(path, "old")
    try:
        os.rename(path, aside / path.name)
        os.rename(temporary, path)
        _sync(path.parent)
    except BaseException:
        if (aside / path.name).exists():
            if path.exists():
                shutil.rmtree(path)
            os.rename(aside / path.name, path)
        aside.rmdir()
        raise
    try:
        shutil.rmtree(aside)
    except OSError as error:
        warnings.warn(
            f"The new checkpoint stands, but the old one could not be removed: {error}. "
            f"Remove '{aside}' yourself.",
            CalipersWarning,
            stacklevel=2,
        )
