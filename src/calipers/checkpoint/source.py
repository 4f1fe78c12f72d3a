"""Where a model came from: the files beside its weights."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from transformers import PreTrainedModel

from calipers.errors import inside_source, would_replace


def source_folder(model: PreTrainedModel) -> Path | None:
    """Return the folder, given or cached, that holds the config.json the model was loaded from.

    Nothing is downloaded.
    """
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
