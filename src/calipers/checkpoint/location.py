"""What lies where a model should be; nothing heavy is imported to find out."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calipers.checkpoint.auxiliary_files import is_auxiliary
from calipers.errors import ModelLoadError, cannot_load, damaged_file, pickled_weights
from calipers.files.reading import LARGEST_JSON, irregular_kind, read_json_object
from calipers.runtime.environment import hub_answers

if TYPE_CHECKING:
    import torch


_LISTED = ("layer", "expert", "head", "label", "block")
_MOST_LISTED = 1 << 20
"""A config is refused that has more of something that transformers makes lists of."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NEAR = 0.8
"""How alike two names are of which one is taken for the other, mistyped; 1 are the same."""
_MAGIC = b"GGUF"
_PACKAGES = ("gguf", "accelerate")  # transformers reads GGUF with the first, and asks for the other


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


def refuse_mistyped(name: str, what: str = "model") -> None:
    """Refuse a name that is not on disk and must be meant for it: the hub is not asked for it.

    Such a name looks like a path, or a folder beside it that holds a model has nearly the same.
    """
    near = _nearest_folder(name)
    if near is not None or _looks_like_path(name):
        error = cannot_load(name, "there is no such folder", what)
        if near is not None:
            full = "One on the hub is named in full: 'owner/name'."
            error.add_hint(f"Did you mean '{near}'? {full}")
        raise error


@contextmanager
def hub_access(name: str, what: str = "model") -> Iterator[None]:
    """Let a name be looked up in the cache of the hub, and on the hub if that answers at once.

    A hub that does not answer is not asked again and again: what is cached is taken, and what is
    not is refused.
    """
    from huggingface_hub import constants

    if os.path.exists(name):
        yield
        return
    refuse_mistyped(name, what)
    before, reached = constants.HF_HUB_OFFLINE, hub_answers()
    cached = [] if reached else _cached(name, "config.json", "tokenizer_config.json")
    if not reached and not any(isinstance(file, str) for file in cached):
        problem = "HF_HUB_OFFLINE is set" if before else f"{constants.ENDPOINT} does not answer"
        absent = f"there is no such folder, and on the hub: {problem}, and it is not in the cache"
        raise cannot_load(name, absent, what)
    constants.HF_HUB_OFFLINE = not reached
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _looks_like_path(name: str) -> bool:
    return (
        name.startswith((".", "~", "/", os.sep))
        or name.endswith(("/", os.sep))
        or name.count("/") > 1
        or os.path.isabs(name)
    )


def _nearest_folder(name: str) -> str | None:
    """Return the folder with a model whose name is nearest to one that does not exist."""
    if name.startswith("~") and os.path.exists(os.path.expanduser(name)):
        return os.path.expanduser(name)
    path = Path(name)
    try:
        models = {
            entry.name for entry in path.parent.iterdir() if (entry / "config.json").is_file()
        }
    except OSError:
        return None
    by_lower = {each.lower(): each for each in models}
    found = difflib.get_close_matches(path.name.lower(), by_lower, n=1, cutoff=_NEAR)
    return str(path.with_name(by_lower[found[0]])) if found else None


def has_no_safetensors(name: str) -> bool:
    """Whether the hub has told that the weights of a model are in no safetensors."""
    from huggingface_hub import _CACHED_NO_EXIST

    found = _cached(name, "model.safetensors", "model.safetensors.index.json")
    return all(each is _CACHED_NO_EXIST for each in found)


def _cached(name: str, *files: str) -> list[Any]:
    """Return what the cache knows of files: where they lie, that there are none, or nothing."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return [try_to_load_from_cache(name, file) for file in files]
    except HFValidationError:
        return [None for _ in files]


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
