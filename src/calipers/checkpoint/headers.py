"""Which tensors the files of a checkpoint hold, read from their headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from calipers.errors import damaged_file
from calipers.files.json_files import read_json_object
from calipers.files.safetensors_header import StoredTensor, read_header

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


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
