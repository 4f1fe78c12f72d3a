"""What a model name stands for: a folder, a file in GGUF or a model on the hub.

Nothing heavy is imported to find out.
"""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calipers.checkpoint.auxiliary_files import is_auxiliary
from calipers.errors import (
    CalipersError,
    ConfigurationError,
    ModelLoadError,
    Option,
    cannot_load,
    damaged_file,
    library_errors,
)
from calipers.files.reading import LARGEST_JSON, irregular_kind, read_json_object
from calipers.runtime.environment import hub_answers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig


_LISTED = ("layer", "expert", "head", "label", "block")
_MOST_LISTED = 1 << 20
"""A config is refused that has more of something that transformers makes lists of."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_FILES = {
    "model": "config.json, generation_config.json and the weights",
    "tokenizer": "tokenizer.json, tokenizer_config.json and the files they name",
}
"""What is read together, so that an error can say which files to look at."""
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
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        refuse_mistyped(name)
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise cannot_load(name, "there is no such folder") from error
        return
    file = gguf_file(name)
    if file is not None and gguf:
        _check_gguf(file)
        return
    if file is not None:
        raise ModelLoadError(
            f"is a model in GGUF, the format of llama.cpp ({file.name}), which can be measured, "
            "quantized and evaluated, but not looked at in its files",
            subject=f"'{name}'",
            hint="Give the folder of a model in safetensors.",
        )
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    by_suffix = {file.suffix.lower(): file.name for file in reversed(files)}
    pickles = [by_suffix[suffix] for suffix in _PICKLES if suffix in by_suffix]
    if pickles and ".safetensors" not in by_suffix:
        raise _pickled_weights(name, pickles[0])
    check_files(files)
    if path.is_file():
        raise cannot_load(name, "it is a file")
    if not (path / "config.json").is_file():
        raise cannot_load(name, "there is no config.json in it")
    config = read_json_object(path / "config.json")
    if config.get("transformers_weights") is not None:
        problem = "it names its weights ('transformers_weights'), and must not"
        raise damaged_file(path / "config.json", problem)
    for key, value in _numbers(config):
        if any(word in key for word in _LISTED) and abs(value) > _MOST_LISTED:
            problem = f"'{key}' is {value:.4g}, more than any model has"
            raise damaged_file(path / "config.json", problem)
    for other in ("generation_config.json", "tokenizer_config.json"):
        if (path / other).exists():
            read_json_object(path / other)


def load_config(name: str, trust_remote_code: bool, *, quantized: bool = False) -> PreTrainedConfig:
    """Return the config of a model; one that is quantized is refused where it may not be."""
    from transformers import AutoConfig

    check_location(name, gguf=True)
    file = gguf_file(name)
    with loading_errors(name, files="config.json" if file is None else file.name):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            name if file is None else file.parent,
            trust_remote_code=trust_remote_code,
            **({} if file is None else {"gguf_file": file.name}),
        )
        if not quantized:
            refuse_quantized(config, name)
    return config


def refuse_quantized(config: PreTrainedConfig, name: str) -> None:
    """Refuse a model whose config says that it is quantized."""
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigurationError(
            "is quantized already: its config has a quantization_config",
            subject=name,
            hint="Start from the model in 16 or 32 bits.",
        )


def check_files(files: Iterable[Path]) -> None:
    """Refuse files beside weights that transformers could wait for or that would fill memory."""
    for file in files:
        kind = irregular_kind(file)
        if kind not in (None, "a folder"):
            raise damaged_file(file, f"it is {kind}, and only regular files are read")
        if is_auxiliary(file.name) and file.is_file() and file.stat().st_size > LARGEST_JSON:
            problem = f"it has {file.stat().st_size:,} bytes, and at most {LARGEST_JSON:,} are read"
            raise damaged_file(file, problem)


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


def refuse_mistyped(name: str, what: str = "model") -> None:
    """Refuse a name that is not on disk and must be meant for it: the hub is not asked for it.

    Such a name looks like a path, or a folder beside it that holds a model has nearly the same.
    """
    near = _nearest_folder(name)
    looks_like_path = (
        name.startswith((".", "~", "/", os.sep))
        or name.endswith(("/", os.sep))
        or name.count("/") > 1
        or os.path.isabs(name)
    )
    if near is not None or looks_like_path:
        error = cannot_load(name, "there is no such folder", what)
        if near is not None:
            full = "One on the hub is named in full: 'owner/name'."
            error.add_hint(f"Did you mean '{near}'? {full}")
        raise error


@contextmanager
def loading_errors(name: str, what: str = "model", files: str | None = None) -> Iterator[None]:
    """Put what transformers says into words of ours."""
    from huggingface_hub import _CACHED_NO_EXIST

    files = files or _FILES[what]

    def unusable(problem: str) -> ModelLoadError:
        return ModelLoadError(
            f"cannot be used ({files}): {problem.rstrip('.')}",
            subject=f"The files of '{name}'",
            hint="Compare them with the original, or copy or download them again. If transformers "
            "loads them, their kind may be one that Calipers does not support.",
        )

    with library_errors(unusable):
        try:
            with _hub_access(name, what):
                yield
        except CalipersError:
            raise
        except (OSError, ValueError, ImportError) as error:
            from transformers.dynamic_module_utils import resolve_trust_remote_code

            # Where transformers asks whether code of a model may run.
            asks = resolve_trust_remote_code.__code__
            if any(frame.f_code is asks for frame, _ in traceback.walk_tb(error.__traceback__)):
                raise ModelLoadError(
                    "comes with Python code of its own, which was not run",
                    subject=f"The {what} '{name}'",
                    hint="Read it, and if you trust it pass "
                    + Option("trust_remote_code", True)
                    + ".",
                ) from error
            files_of_model = ("model.safetensors", "model.safetensors.index.json")
            if what == "model" and all(
                file is _CACHED_NO_EXIST for file in _cached(name, *files_of_model)
            ):
                raise _pickled_weights(name, "it has no model.safetensors") from error
            absent = "" if Path(name).exists() else "there is no such folder, and on the hub: "
            if absent or isinstance(error, OSError):
                raise cannot_load(name, absent + str(error).strip(), what) from error
            raise


@contextmanager
def _hub_access(name: str, what: str) -> Iterator[None]:
    """Look a name up in the cache of the hub, and on the hub if that answers at once.

    A hub that does not answer is not asked again: what is not cached is refused.
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
    by_lower = {model.lower(): model for model in models}
    nearest = difflib.get_close_matches(path.name.lower(), by_lower, n=1, cutoff=_NEAR)
    return str(path.with_name(by_lower[nearest[0]])) if nearest else None


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
        return path if path.suffix.lower() == ".gguf" else None
    files = sorted(path.iterdir()) if os.path.isdir(path) else []
    in_gguf = [file for file in files if file.suffix.lower() == ".gguf"]
    if not in_gguf or any(file.suffix.lower() == ".safetensors" for file in files):
        return None
    if len(in_gguf) > 1:
        names = ", ".join(file.name for file in in_gguf)
        raise ModelLoadError(
            f"holds several models in GGUF: {names}", subject=f"'{name}'", hint="Give one of them."
        )
    return in_gguf[0]


def _check_gguf(file: Path) -> None:
    """Refuse a file that is damaged, or that needs packages which are not installed."""
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


def _pickled_weights(name: str, file: str) -> ModelLoadError:
    """Refuse weights that are pickles, which can run any code."""
    return ModelLoadError(
        f"are pickles ({file}), which can run any code when they are opened; Calipers opens "
        "safetensors only",
        subject=f"The weights of '{name}'",
        hint="If you trust where they come from, convert the model once, with transformers: "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder), the same "
        "with AutoTokenizer, and give the other folder.",
    )
