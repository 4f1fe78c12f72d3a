"""The files beside the weights: known by name, copied from the source model, and written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calipers.errors import inside_source, would_replace
from calipers.files.reading import read_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NOTES = "calipers.json"
TEMPLATE_FOLDERS = ("additional_chat_templates", "chat_templates")
_PROCESSING = (
    "added_tokens.json",
    "chat_template.json",
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
    "chat_template.jinja",
    *(f"{folder}/*.jinja" for folder in TEMPLATE_FOLDERS),
    *_PROCESSING,
)
_TOKENIZER_FILES = ("*tokenizer*", "*.tiktoken", "*.jinja", *TEMPLATE_FOLDERS, *_PROCESSING)


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
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    # No file that is hidden belongs to a checkpoint, whatever the notes say.
    written = {n for n in names if not any(part.startswith(".") for part in n.split("/"))}
    return sorted(_foreign(folder, "", written))


def _foreign(folder: Path, prefix: str, written: set[str]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = prefix + entry.name
            holds_some = any(file.startswith(f"{name}/") for file in written)
            if entry.is_dir(follow_symlinks=False) and (name in TEMPLATE_FOLDERS or holds_some):
                yield from _foreign(Path(entry.path), f"{name}/", written)
                continue
            known = [pattern for pattern in _FILES if pattern.count("/") == name.count("/")]
            belongs = name in written or any(fnmatchcase(name, pattern) for pattern in known)
            if not entry.is_file(follow_symlinks=False) or not belongs:
                yield name


def _read(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_whole(file))
        return content if isinstance(content, dict) else {}
    return {}


def source_folder(model: PreTrainedModel) -> Path | None:
    """Return the folder, given or cached, that holds the config.json the model was loaded from.

    Nothing is downloaded.
    """
    from huggingface_hub import try_to_load_from_cache

    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not name:
        return None
    if (Path(name) / "config.json").is_file():
        return Path(name)
    with suppress(ValueError):  # not a name that a model on the hub could have
        revision = getattr(model.config, "_commit_hash", None)
        cached = try_to_load_from_cache(name, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def check_apart(directory: str | os.PathLike[str], model: PreTrainedModel) -> None:
    """Refuse an output folder that is, holds or is inside the one the model was loaded from."""
    source, path = source_folder(model), Path(os.path.realpath(directory))
    if source is None:
        return
    if path in (source.resolve(), *source.resolve().parents):
        raise would_replace(path, source)
    if source.resolve() in path.parents:
        raise inside_source(path, source)


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
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file that people can read."""
    _write(path, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False))


def _write(path: Path, text: str) -> None:
    path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")


def _copy(source: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    for path in {path for pattern in patterns for path in source.glob(pattern)}:
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
