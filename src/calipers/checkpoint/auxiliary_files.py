"""The small files of a checkpoint, beside its tensors and its config."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from calipers.checkpoint.folder_contents import NOTES, TEMPLATE_FOLDERS
from calipers.checkpoint.source import source_folder

_TOKENIZER_FILES = (
    "*tokenizer*",
    "*.tiktoken",
    "*.jinja",
    "added_tokens.json",
    "chat_template.json",
    *TEMPLATE_FOLDERS,
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
)


def write_auxiliary_files(
    model: PreTrainedModel,
    folder: Path,
    *,
    recipe: str,
    tokenizer: Any = None,
) -> list[str]:
    """Write the recipe, the tokenizer, the generation config and the model's code.

    Returns the names of all these files.
    """
    before, source = set(_files_in(folder)), source_folder(model)
    _write(folder / "recipe.yaml", recipe)
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        # Not its save_pretrained, which refuses what some original models have.
        generation.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    elif source is not None:
        _copy(source, folder, _TOKENIZER_FILES)
    if source is not None and getattr(model.config, "auto_map", None):
        _copy(source, folder, ("*.py",))
    return sorted(set(_files_in(folder)) - before)


def write_notes(folder: Path, files: Sequence[str], notes: Mapping[str, Any]) -> None:
    """Write calipers.json: how the checkpoint was made, and which files are beside its tensors."""
    content = {"calipers": version("calipers"), "files": list(files), **notes}
    write_json(folder / NOTES, content)


def _files_in(folder: Path) -> Iterator[str]:
    return (each.relative_to(folder).as_posix() for each in folder.rglob("*") if each.is_file())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that people can read."""
    _write(path, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False))


def _write(path: Path, text: str) -> None:
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def _copy(source: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    for found in {path for pattern in patterns for path in source.glob(pattern)}:
        if found.is_dir():
            shutil.copytree(found, folder / found.name)
        else:
            shutil.copyfile(found, folder / found.name)
