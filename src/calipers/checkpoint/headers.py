"""Which tensors the files of a checkpoint hold, read from their headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES

from calipers.checkpoint.json_files import parse_json_object, read_json_object
from calipers.errors import damaged_file, library_errors

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000
"""What safetensors itself allows, in bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, and how many bytes it takes there."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    size: int


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by their names; none where it has no safetensors.

    Every header is compared with its file and with the index, so that what was cut off, mixed up
    or lost is noticed before anything is loaded.
    """
    found: dict[str, StoredTensor] = {}
    index = _read_index(folder)
    for file in dict.fromkeys(index.values()) if index else _single_file(folder):
        for name, tensor in read_header(file).items():
            if name in found:
                other = found[name].file.name
                raise damaged_file(file, f"tensor '{name}' is in '{other}', too")
            found[name] = tensor
    for name, file in index.items():
        if name not in found or found[name].file != file:
            problem = f"it says that '{file.name}' holds '{name}', which is not there"
            raise damaged_file(folder / _INDEX, problem)
    return found


def first_float_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype | None:
    """Return the dtype that transformers loads a model in whose config has none."""
    dtypes = (tensor.dtype for tensor in stored.values())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def read_header(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file, whose header must account for every byte of it."""
    with file.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        size = file.stat().st_size
        if len(start) < 8 or length > min(size - 8, _LARGEST_HEADER):
            problem = f"{size:,} bytes, which end before its header does (an interrupted download?)"
            raise damaged_file(file, problem)
        header = parse_json_object(opened.read(length), file)
    header.pop("__metadata__", None)
    with library_errors(lambda words: damaged_file(file, f"no list of tensors: {words}")):
        tensors = {name: _entry(file, entry) for name, entry in header.items()}
    _check_extent(file, tensors.values(), size - 8 - length)
    with library_errors(lambda words: damaged_file(file, words)), safe_open(file, "pt"):
        return tensors


def _entry(file: Path, entry: dict[str, Any]) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    dtype: torch.dtype = _TYPES[entry["dtype"]]  # type: ignore[assignment]
    return StoredTensor(file, dtype, shape, end - begin)


def _check_extent(file: Path, tensors: Iterable[StoredTensor], size: int) -> None:
    """Refuse a file that ends too early; safetensors finds all else that is wrong with a header."""
    needed = sum(tensor.size for tensor in tensors)
    if needed > size:
        problem = (
            f"its header speaks of {needed:,} bytes of tensors, and {size:,} are there "
            "(an interrupted download?)"
        )
        raise damaged_file(file, problem)


def _single_file(folder: Path) -> list[Path]:
    single = folder / _SINGLE
    return [single] if single.is_file() else []


def _read_index(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor that the index names; transformers prefers a single file."""
    index = folder / _INDEX
    if not index.is_file() or _single_file(folder):
        return {}
    content = read_json_object(index)
    for key in ("metadata", "weight_map"):
        if not isinstance(content.get(key), dict):
            raise damaged_file(index, f"'{key}' must be an object, got {content.get(key)!r}")
    if not content["weight_map"]:
        raise damaged_file(index, "its weight_map is empty")
    return {name: _file_of(index, file) for name, file in content["weight_map"].items()}


def _file_of(index: Path, name: Any) -> Path:
    if not isinstance(name, str) or not name.endswith(".safetensors"):
        raise damaged_file(index, f"its weight_map names {name!r}, no safetensors file")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise damaged_file(index, f"its weight_map names '{name}', outside of the folder")
    if not (index.parent / path).is_file():
        raise damaged_file(index, f"its weight_map names '{name}', which does not exist")
    return index.parent / path
