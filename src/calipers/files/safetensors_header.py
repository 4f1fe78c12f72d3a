"""Which tensors a safetensors file holds, read from its header alone."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES
from torch import Tensor

from calipers.errors import CalipersError, damaged_file, library_errors
from calipers.files.reading import LARGEST_JSON, Damaged, open_regular, parse_json_object


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, where it begins there, and how many bytes it takes."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int
    begin: int

    def read(self) -> Tensor:
        """Return it in memory of its own; the file is not mapped, so that none of it stays."""
        values = torch.empty(self.shape, dtype=self.dtype)
        with self.file.open("rb", buffering=0) as opened:
            opened.seek(self.begin)
            self.fill(opened, values.view(-1).view(torch.uint8).numpy().data)
        return values

    def map(self) -> Tensor:
        """Return it in the memory that the file has already, where that is possible.

        This is for tensors that are let go soon: whoever shortens the file takes their memory away.
        Writing to them does not change the file.
        """
        before = self.begin % mmap.ALLOCATIONGRANULARITY
        if not self.size or self.begin % self.dtype.itemsize:
            return self.read()
        with self.file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_size < self.begin + self.size:
                raise self._too_short()
            place = self.begin - before
            mapped = mmap.mmap(
                opened.fileno(), before + self.size, access=mmap.ACCESS_COPY, offset=place
            )
        values = torch.frombuffer(mapped, dtype=torch.uint8, offset=before)
        return values.view(self.dtype).view(self.shape)

    def read_every(self, step: int) -> Tensor:
        """Return every so many-th value, without reading the others."""
        count, size = math.prod(self.shape), self.dtype.itemsize
        values = torch.empty(-(-count // step), dtype=self.dtype)
        with self.file.open("rb", buffering=0) as opened:
            for index, value in enumerate(values.view(torch.uint8).view(len(values), size)):
                opened.seek(self.begin + index * step * size)
                self.fill(opened, value.numpy().data)
        return values

    def fill(self, opened: RawIOBase, room: memoryview) -> None:
        """Read from where a file is until there is no room left."""
        while len(room):
            count = opened.readinto(room)
            if not count:
                raise self._too_short()
            room = room[count:]

    def _too_short(self) -> CalipersError:
        return damaged_file(self.file, "it has become shorter (is it being written?)")


def read_header(file: Path, damaged: Damaged = damaged_file) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, whose header must account for every byte of it."""
    with open_regular(file) as opened:
        prefix = opened.read(8)
        length = int.from_bytes(prefix, "little")
        size = file.stat().st_size
        if len(prefix) < 8 or length > min(size - 8, LARGEST_JSON):
            problem = f"{size:,} bytes, which end before its header does (an interrupted download?)"
            raise damaged(file, problem)
        header = parse_json_object(opened.read(length), file, damaged)
    header.pop("__metadata__", None)
    tensors: dict[str, StoredTensor] = {}
    with library_errors(lambda words: damaged(file, f"no list of tensors: {words}")):
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            shape = tuple(int(extent) for extent in entry["shape"])
            dtype: torch.dtype = _TYPES[entry["dtype"]]  # type: ignore[assignment]
            tensors[name] = StoredTensor(file, dtype, shape, end - begin, 8 + length + begin)
    # The end alone is checked here; safetensors finds all else that is wrong with a header.
    needed, present = sum(tensor.size for tensor in tensors.values()), size - 8 - length
    if needed > present:
        problem = (
            f"its header speaks of {needed:,} bytes of tensors, and {present:,} are there "
            "(an interrupted download?)"
        )
        raise damaged(file, problem)
    with library_errors(lambda words: damaged(file, words)), safe_open(file, "pt"):
        return tensors
