"""What lies at the place where a model should be; nothing heavy is imported to find out."""

from __future__ import annotations

from pathlib import Path

from calipers.checkpoint.hub import refuse_mistyped
from calipers.errors import GgufError, ModelLoadError, PickledModelError

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_place(name: str) -> None:
    """Refuse what is on disk and is not a model of transformers in safetensors.

    What is not on disk may be a name on the hub.
    """
    path = Path(name)
    if not path.exists():
        refuse_mistyped(name)
        if path.is_absolute() or not _can_be_on_hub(name):
            raise ModelLoadError(name, "there is no such folder")
        return
    _refuse_other_weights(name, sorted(path.iterdir()) if path.is_dir() else [path])
    if path.is_file():
        raise ModelLoadError(name, "it is a file")
    if not (path / "config.json").is_file():
        raise ModelLoadError(name, "there is no config.json in it")


def _refuse_other_weights(name: str, files: list[Path]) -> None:
    first = {file.suffix.lower(): file.name for file in reversed(files)}
    if ".safetensors" in first:
        return
    if ".gguf" in first:
        raise GgufError(name, first[".gguf"])
    for suffix in _PICKLES:
        if suffix in first:
            raise PickledModelError(name, first[suffix])


def _can_be_on_hub(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
