"""Names that are no folders of this disk: which of them the hub is asked for, and how long."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calipers.errors import cannot_load
from calipers.runtime.network import hub_answers

_NEAR = 0.8
"""How alike two names are of which one is taken for the other, mistyped; 1 are the same."""


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
