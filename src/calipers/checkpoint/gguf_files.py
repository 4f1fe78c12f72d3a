"""Models in GGUF, the format of llama.cpp: found here, and read by transformers."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from calipers.errors import ModelLoadError, cannot_load

if TYPE_CHECKING:
    import torch

_MAGIC = b"GGUF"
_PACKAGES = ("gguf", "accelerate")  # transformers reads GGUF with the first, and asks for the other


def gguf_file(name: str | os.PathLike[str]) -> Path | None:
    """Return the file that a path means: one in GGUF, or that of a folder without safetensors."""
    path = Path(name)
    if os.path.isfile(path):
        return path if _is_gguf(path) else None
    files = sorted(path.iterdir()) if os.path.isdir(path) else []
    found = [file for file in files if _is_gguf(file)]
    if not found or any(file.suffix.lower() == ".safetensors" for file in files):
        return None
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ModelLoadError(
            f"holds several models in GGUF: {names}", subject=f"'{name}'", hint="Give one of them."
        )
    return found[0]


def check_gguf(file: Path) -> None:
    """Refuse a file that is damaged, or that nobody here can read."""
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise cannot_load(str(file), "it does not begin as files in GGUF do")
    missing = [package for package in _PACKAGES if find_spec(package) is None]
    if missing:
        raise ModelLoadError(
            f"is in GGUF, and reading it needs {' and '.join(missing)}",
            subject=f"'{file}'",
            hint="Install what is missing with pip install 'calipers[gguf]'.",
        )


def dequantized_dtype(file: Path) -> torch.dtype:
    """Return the dtype in which a file holds its numbers; float32 holds those of every block."""
    import torch

    kinds = _kinds_of_tensors(file, file.stat().st_mtime_ns)
    if "BF16" in kinds <= {"F32", "BF16"}:
        return torch.bfloat16
    return torch.float16 if "F16" in kinds <= {"F32", "F16"} else torch.float32


@lru_cache(maxsize=1)  # the vocabulary is read, too, which takes seconds
def _kinds_of_tensors(file: Path, _changed: int) -> frozenset[str]:
    from gguf import GGMLQuantizationType, GGUFReader

    tensors = GGUFReader(file).tensors
    return frozenset(GGMLQuantizationType(tensor.tensor_type).name for tensor in tensors)


def _is_gguf(file: Path) -> bool:
    return file.suffix.lower() == ".gguf"
