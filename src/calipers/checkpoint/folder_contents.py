"""What a folder holds: a quantized checkpoint and nothing else, or something that must stay."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from calipers.files.regular_files import read_whole

NOTES = "calipers.json"
TEMPLATE_FOLDERS = ("additional_chat_templates", "chat_templates")
_FILES = (
    NOTES,
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "recipe.yaml",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    *(f"{folder}/*.jinja" for folder in TEMPLATE_FOLDERS),
)


def is_quantized(folder: Path) -> bool:
    """Whether the files of a folder say that a quantized checkpoint was written there."""
    config = _read(folder / "config.json")
    return "calipers" in _read(folder / NOTES) or bool(config.get("quantization_config"))


def is_auxiliary(name: str) -> bool:
    """Whether a file is one of the small ones that a model has beside its weights."""
    known = (pattern for pattern in _FILES if not pattern.endswith(".safetensors"))
    return any(fnmatchcase(name, pattern) for pattern in known)


def foreign_files(folder: Path) -> list[str]:
    """Return what lies in a folder and belongs to no checkpoint that was written there.

    What belongs is what the notes of Calipers list, and what such files are called everywhere.
    """
    listed = _read(folder / NOTES).get("files")
    written = {name for name in listed if _is_plain(name)} if isinstance(listed, list) else set()
    return sorted(_foreign(folder, "", written))


def _foreign(folder: Path, prefix: str, written: set[str]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            if entry.is_dir(follow_symlinks=False) and _may_hold(name, written):
                yield from _foreign(Path(entry.path), f"{name}/", written)
            elif not entry.is_file(follow_symlinks=False) or not _belongs(name, written):
                yield name


def _belongs(name: str, written: set[str]) -> bool:
    depth = name.count("/")
    known = (pattern for pattern in _FILES if pattern.count("/") == depth)
    return name in written or any(fnmatchcase(name, pattern) for pattern in known)


def _may_hold(name: str, written: set[str]) -> bool:
    return name in TEMPLATE_FOLDERS or any(file.startswith(f"{name}/") for file in written)


def _is_plain(name: Any) -> bool:
    """Whether a name in the notes is one of a file that nobody hides."""
    return isinstance(name, str) and not any(part.startswith(".") for part in name.split("/"))


def _read(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_whole(file))
        return content if isinstance(content, dict) else {}
    return {}
