"""A model as it was found, and back to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from compressed_tensors.offload import OffloadCache


class Snapshot:
    """Remembers every attribute, parameter, submodule and hook of every module of a model.

    No tensor is copied: what changes a tensor in place is not undone.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> before = Snapshot(model)
    >>> model[0].note, model[0].weight = "hello", None
    >>> before.restore()
    >>> hasattr(model[0], "note"), model[0].weight.shape
    (False, torch.Size([2, 2]))
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._attention = [(config, config._attn_implementation) for config in _configs(model)]
        self._modules = {module: dict(vars(module)) for module in model.modules()}
        # Handles of hooks refer to the very dictionary the hook is in: its contents are restored.
        self._contents = {
            id(content): (content, content.copy())
            for attributes in self._modules.values()
            for content in map(_content, attributes.values())
            if content is not None
        }

    def restore(self) -> None:
        """Bring the model back."""
        for value, content in self._contents.values():
            value.clear()
            value.extend(content) if isinstance(value, list) else value.update(content)
        for module, attributes in self._modules.items():
            vars(module).clear()
            vars(module).update(attributes)
        for config, implementation in self._attention:
            # Not by the property, which sets it for all that belong to this config.
            config._attn_implementation_internal = implementation


@contextmanager
def left_as_found(model: torch.nn.Module) -> Iterator[None]:
    """Bring the model back when the block is left, by whichever way."""
    before = Snapshot(model)
    try:
        yield
    finally:
        before.restore()


@contextmanager
def unchanged_on_error(model: torch.nn.Module) -> Iterator[None]:
    """Bring the model back when the block is left by an exception."""
    before = Snapshot(model)
    try:
        yield
    except BaseException:
        before.restore()
        raise


def _content(value: Any) -> dict[Any, Any] | set[Any] | list[Any] | None:
    """Return the container that an attribute is, or keeps its tensors in."""
    if isinstance(value, OffloadCache):
        value = value.offloaded_values
    return value if isinstance(value, (dict, set, list)) else None


def _configs(model: torch.nn.Module) -> list[Any]:
    """Return the configs of a model and its parts in which an attention implementation stands."""
    found: dict[int, Any] = {}
    waiting = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config: Any = waiting.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())
