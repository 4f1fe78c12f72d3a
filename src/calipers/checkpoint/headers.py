"""Which tensors the files of a checkpoint hold, read from their headers alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import torch

from calipers.errors import damaged_file
from calipers.files.reading import read_json_object
from calipers.files.safetensors_header import StoredTensor, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class IndexDefect(NamedTuple):
    """Something that is wrong with the index of a checkpoint.

    :param name: of a tensor or, for the kinds ``outside`` and ``missing-file``, of a file
    :param problem: the rest of a sentence that begins with the name
    """

    kind: Literal["metadata", "outside", "missing-file", "missing-tensor", "double"]
    name: str
    problem: str


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint by their names; none where it has no safetensors.

    Every header is checked against its file and the index before anything is loaded.
    """
    tensors, defects = readable_tensors(folder)
    if defects:
        _, name, problem = defects[0]
        raise damaged_file(folder / INDEX, f"'{name}' {problem}")
    return tensors


def readable_tensors(folder: Path) -> tuple[dict[str, StoredTensor], list[IndexDefect]]:
    """Return the tensors of the files that can be read, and the defects of the index."""
    index, defects = _read_index(folder)
    single = folder / SINGLE
    tensors: dict[str, StoredTensor] = {}
    for file in [single] if single.is_file() else dict.fromkeys(index.values()):
        for name, tensor in read_header(file).items():
            if name in tensors:
                problem = f"is in '{tensors[name].file.name}' and in '{file.name}'"
                defects.append(IndexDefect("double", name, problem))
            tensors.setdefault(name, tensor)
    for name, file in index.items():
        if name not in tensors or tensors[name].file != file:
            place = file.relative_to(folder)
            problem = f"is not in '{place}', where the index says that it is"
            defects.append(IndexDefect("missing-tensor", name, problem))
    return tensors, defects


def size_on_disk(folder: Path) -> int:
    """Return the bytes of all tensors in the files of a folder, without what names them."""
    return sum(tensor.size for tensor in stored_tensors(folder).values())


def bits_per_weight(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, Sequence[int]]
) -> float | None:
    """Return the bits that a quantized weight takes, scales included; None if there is none.

    :param shapes: of the quantized weights, by the names of their modules
    """
    size = 0
    for name, tensor in stored.items():
        module, _, local = name.rpartition(".")
        if module in shapes and local.startswith("weight"):
            size += tensor.size
    return 8 * size / sum(map(math.prod, shapes.values())) if shapes else None


def first_float_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype | None:
    """Return the dtype that transformers loads a model in whose config has none."""
    dtypes = (tensor.dtype for tensor in stored.values())
    return next((dtype for dtype in dtypes if dtype.is_floating_point), None)


def _read_index(folder: Path) -> tuple[dict[str, Path], list[IndexDefect]]:
    """Return the file of each tensor in the index, if it is used: a single file comes first."""
    file, defects = folder / INDEX, list[IndexDefect]()
    if not file.is_file() or (folder / SINGLE).is_file():
        return {}, []
    content = read_json_object(file)
    if not isinstance(content.get("metadata"), dict):
        problem = f"must be an object, got {content.get('metadata')!r}"
        defects.append(IndexDefect("metadata", "metadata", problem))
    files = content.get("weight_map")
    if not isinstance(files, dict):
        raise damaged_file(file, f"'weight_map' must be an object, got {files!r}")
    if not files:
        raise damaged_file(file, "its weight_map is empty")
    for name in files.values():
        if not isinstance(name, str):
            raise damaged_file(file, f"its weight_map names {name!r}, no safetensors file")
    usable = set()
    for name in dict.fromkeys(files.values()):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            problem = "is outside of the folder of the checkpoint, and the index names it"
            defects.append(IndexDefect("outside", name, problem))
        elif path.suffix != ".safetensors" or not (folder / path).is_file():
            problem = "is named by the index and does not exist as a safetensors file"
            defects.append(IndexDefect("missing-file", name, problem))
        else:
            usable.add(name)
    index = {tensor: folder / name for tensor, name in files.items() if name in usable}
    return index, defects
