"""Fields of statistics in a file that stays open, each read when it is needed."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from calipers.errors import MeasurementsError
from calipers.files.reading import open_regular
from calipers.files.safetensors_header import StoredTensor

if TYPE_CHECKING:
    from io import RawIOBase


class OpenFile:
    """A file that was checked, and is read later.

    It stays open: a file that is moved to its place meanwhile is another one, and does not matter.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        self._opened = cast("RawIOBase", open_regular(path, buffering=0))
        self._state = self._present_state()

    def __del__(self) -> None:
        opened = self.__dict__.get("_opened")  # there is none where opening it has failed
        if opened is not None:
            opened.close()

    def read(self, stored: StoredTensor) -> mmap.mmap:
        """Return the bytes of a tensor in pages of their own, which go as soon as they are free."""
        if self._present_state() != self._state:
            raise MeasurementsError(
                "has been changed since it was opened, and what is needed of it now cannot be "
                "trusted",
                subject=f"The file '{self._path}'",
                hint="Start again with the file as it is now.",
            )
        pages = mmap.mmap(-1, stored.size)
        with self._lock:
            self._opened.seek(stored.begin)
            stored.fill(self._opened, memoryview(pages))
        return pages

    def _present_state(self) -> tuple[int, int]:
        state = os.fstat(self._opened.fileno())
        return state.st_size, state.st_mtime_ns


class StoredField:
    """A tensor of an open file; while somebody holds its memory, it is not read again."""

    def __init__(self, file: OpenFile, stored: StoredTensor) -> None:
        self._file, self._stored = file, stored
        self._pages: weakref.ref[mmap.mmap] | None = None

    def __call__(self) -> Tensor:
        """Return the tensor."""
        stored = self._stored
        if not stored.size:
            return torch.empty(stored.shape, dtype=stored.dtype)
        pages = None if self._pages is None else self._pages()
        if pages is None:
            pages = self._file.read(stored)
            self._pages = weakref.ref(pages)
        return torch.frombuffer(pages, dtype=torch.uint8).view(stored.dtype).view(stored.shape)
