"""What lies where a model should be; nothing heavy is imported to find out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from calipers.checkpoint.folder_contents import is_auxiliary
from calipers.checkpoint.gguf_files import check_gguf, gguf_file
from calipers.checkpoint.hub import refuse_mistyped
from calipers.errors import ModelLoadError, cannot_load, damaged_file, pickled_weights
from calipers.files.json_files import read_json_object
from calipers.files.regular_files import LARGEST_JSON, irregular_kind

_LISTED = ("layer", "expert", "head", "label", "block")
_MOST_LISTED = 1 << 20
"""A config is refused that has more of something that transformers makes lists of."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_location(name: str, *, gguf: bool = False) -> None:
    """Refuse what is on disk and is not a model of transformers in safetensors.

    What is not on disk may be a name on the hub.

    :param gguf: whether it may also be a model in GGUF
    """
    path = Path(name)
    if not path.exists():
        refuse_mistyped(name)
        if path.is_absolute() or not _can_be_on_hub(name):
            raise cannot_load(name, "there is no such folder")
        return
    file = gguf_file(name)
    if file is not None and gguf:
        check_gguf(file)
        return
    if file is not None:
        raise _in_gguf(name, file.name)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    _refuse_other_weights(name, files)
    check_files(files)
    if path.is_file():
        raise cannot_load(name, "it is a file")
    if not (path / "config.json").is_file():
        raise cannot_load(name, "there is no config.json in it")
    _check_config(path / "config.json")
    for other in ("generation_config.json", "tokenizer_config.json"):
        if (path / other).exists():
            read_json_object(path / other)


def check_files(files: Iterable[Path]) -> None:
    """Refuse files beside weights that transformers could wait for or that would fill memory."""
    for file in files:
        kind = irregular_kind(file)
        if kind not in (None, "a folder"):
            raise damaged_file(file, f"it is {kind}, and only regular files are read")
        if is_auxiliary(file.name) and file.is_file() and file.stat().st_size > LARGEST_JSON:
            problem = f"it has {file.stat().st_size:,} bytes, and at most {LARGEST_JSON:,} are read"
            raise damaged_file(file, problem)


def _check_config(file: Path) -> None:
    """Refuse a config that names other files, or that no memory would be enough to read."""
    config = read_json_object(file)
    if config.get("transformers_weights") is not None:
        problem = "it names its weights ('transformers_weights'), and must not"
        raise damaged_file(file, problem)
    for key, value in _numbers(config):
        if any(word in key for word in _LISTED) and abs(value) > _MOST_LISTED:
            raise damaged_file(file, f"'{key}' is {value:.4g}, more than any model has")


def _numbers(content: Any, key: str = "") -> Iterator[tuple[str, float]]:
    """Give every number of a JSON file with the key that it stands under."""
    if isinstance(content, dict):
        for inner, value in content.items():
            yield from _numbers(value, inner)
    elif isinstance(content, list):
        for value in content:
            yield from _numbers(value, key)
    elif isinstance(content, (int, float)):
        yield key, content


def _refuse_other_weights(name: str, files: list[Path]) -> None:
    first = {file.suffix.lower(): file.name for file in reversed(files)}
    if ".safetensors" in first:
        return
    for suffix in _PICKLES:
        if suffix in first:
            raise pickled_weights(name, first[suffix])


def _in_gguf(name: str, file: str) -> ModelLoadError:
    return ModelLoadError(
        f"is a model in GGUF, the format of llama.cpp ({file}), which can be measured, quantized "
        "and evaluated, but not looked at in its files",
        subject=f"'{name}'",
        hint="Give the folder of a model in safetensors.",
    )


def _can_be_on_hub(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
