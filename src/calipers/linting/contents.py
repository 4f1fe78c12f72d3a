"""The files of a checkpoint, read as far as they can be; what is wrong with their index is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from calipers.errors import damaged_file
from calipers.files.json_files import read_json_object
from calipers.files.safetensors_header import StoredTensor, read_header
from calipers.linting.results import Finding

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COPY = "Copy the file again, or write the checkpoint again."


@dataclass(frozen=True)
class Contents:
    """The tensors of a checkpoint by their names, and what is wrong with the list of them."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    findings: tuple[Finding, ...] = ()


def read_contents(folder: Path) -> Contents:
    """Read the headers of all files; a file that is no safetensors is refused."""
    findings: list[Finding] = []
    index = _read_index(folder)
    files = [folder / _SINGLE] if index is None else _files_of(folder, index, findings)
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if name in tensors:
                problem = f"is in '{tensors[name].file.name}' and in '{file.name}'"
                findings.append(Finding("error", "index-double", name, problem, _COPY))
            tensors.setdefault(name, tensor)
    for name, file_name in (index or {}).items():
        is_there = name in tensors and tensors[name].file == folder / file_name
        if folder / file_name in files and not is_there:
            problem = f"is not in '{file_name}', where the index says that it is"
            findings.append(Finding("error", "index-missing-tensor", name, problem, _COPY))
    return Contents(folder, tensors, tuple(findings))


def _read_index(folder: Path) -> dict[str, Any] | None:
    """Return the file of each tensor; None where there is one file, as transformers prefers."""
    index = folder / _INDEX
    if (folder / _SINGLE).is_file():
        return None
    if not index.is_file():
        raise damaged_file(folder, f"there is neither {_SINGLE} nor {_INDEX} in it")
    found = read_json_object(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise damaged_file(index, "'weight_map' must be an object with the file of each tensor")
    return found


def _files_of(folder: Path, index: Mapping[str, Any], findings: list[Finding]) -> list[Path]:
    """Return the files that the index names and that are there."""
    found = []
    for name in dict.fromkeys(each for each in index.values() if isinstance(each, str)):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
            problem = "is outside of the folder of the checkpoint, and the index names it"
            hint = "Do not load this checkpoint before its index has been corrected."
            findings.append(Finding("error", "index-outside", name, problem, hint))
        elif path.suffix != ".safetensors" or not (folder / path).is_file():
            problem = "is named by the index and does not exist as a safetensors file"
            findings.append(Finding("error", "index-missing-file", name, problem, _COPY))
        else:
            found.append(folder / path)
    if any(not isinstance(each, str) for each in index.values()):
        raise damaged_file(folder / _INDEX, "its weight_map names something that is no text")
    return found
