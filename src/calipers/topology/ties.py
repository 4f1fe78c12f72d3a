"""Parameters that are one with another one, as a model has them and as it declares them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def shared_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Return each parameter that is the same tensor as one before it, with the name of that."""
    first: dict[int, str] = {}
    parameters = model.named_parameters(remove_duplicate=False)
    names = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    return {name: other for name, other in names.items() if name != other}


def declared_ties(model: torch.nn.Module, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Return the copies among tensors that the classes of a model declare, with their sources."""
    for prefix, module in model.named_modules():
        start = f"{prefix}." if prefix else ""
        for copy, source in (getattr(module, "_tied_weights_keys", None) or {}).items():
            pattern = re.compile(re.escape(start) + copy)
            for name in filter(pattern.fullmatch, names):
                yield name, start + source


def says_tied(model: torch.nn.Module) -> bool:
    """Whether the config says that embedding and head are one."""
    config: Any = model.config
    return bool(getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False))
