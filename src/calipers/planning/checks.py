"""What can be told about a plan before any data runs: which tensors cannot be quantized so."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from compressed_tensors.utils import get_head_dim, get_num_attn_heads, get_num_kv_heads

from calipers.errors import (
    AlreadyQuantizedError,
    ModulesDivisibilityError,
    UnfitError,
    group_sizes_for,
)
from calipers.numerics.layout import indivisible_by
from calipers.planning.schemes import has_free_groups
from calipers.planning.specs import ModuleSpec, TensorSpec


def check_modules(model: torch.nn.Module, planned: Sequence[ModuleSpec]) -> None:
    """Refuse modules and tensors that cannot be quantized as planned."""
    named = dict(model.named_modules())
    modules = {each.name: named[each.name] for each in planned}
    quantized = [
        name
        for name, module in modules.items()
        if getattr(module, "quantization_scheme", None) is not None
    ]
    if quantized:
        raise AlreadyQuantizedError(quantized)
    if any(each.kind != "linear" for each in planned):
        _check_heads(model, next(each for each in planned if each.kind != "linear"))
    for each in planned:
        if each.tensor("input") and isinstance(modules[each.name], torch.nn.Embedding):
            problem = "the input of an Embedding is token ids. Quantize its weights only."
            raise UnfitError(each.name, "input", problem)
    _check_divisibility(modules, planned)


def _check_heads(model: Any, planned: ModuleSpec) -> None:
    """Ask compressed-tensors for the shape of attention states now, not after all the data."""
    try:
        config = model.config.get_text_config(decoder=True)
        for find in (get_num_attn_heads, get_num_kv_heads, get_head_dim):
            find(config)
    except Exception as error:
        reason = str(error).split(". ")[0]
        tensors = "/".join(tensor.base_name for tensor in planned.tensors)
        problem = (
            "compressed-tensors does not find the shape of the attention states of "
            f"{type(model).__name__}: {reason}. Its queries, keys and values cannot be quantized."
        )
        raise UnfitError(planned.name, tensors, problem) from error


def _check_divisibility(modules: dict[str, torch.nn.Module], planned: Sequence[ModuleSpec]) -> None:
    indivisible: list[tuple[str, str, int, int]] = []
    grouped: list[int] = []  # the sizes that groups cut, where another size can be chosen
    for each in planned:
        for tensor in each.tensors:
            unfit = list(_indivisible(each, modules[each.name], tensor))
            indivisible.extend(unfit)
            if tensor.base_name == "weight" and has_free_groups(tensor.args):
                grouped.append(_size(modules[each.name], tensor))
            elif unfit:
                grouped.append(1)  # no other size helps here
    if indivisible:
        raise ModulesDivisibilityError(indivisible, group_sizes_for(math.gcd(*grouped)))


def _indivisible(
    planned: ModuleSpec, module: torch.nn.Module, tensor: TensorSpec
) -> Iterator[tuple[str, str, int, int]]:
    """Yield the tensor with its size and that of its groups, if they do not fit."""
    if tensor.base_name in ("q", "k", "v"):
        return
    size = _size(module, tensor)
    width = indivisible_by(size, tensor.args)
    if width is not None:
        yield planned.name, tensor.base_name, size, width


def _size(module: torch.nn.Module, tensor: TensorSpec) -> int:
    """Return the size of the dimension that groups cut."""
    if isinstance(module, torch.nn.Embedding):
        return module.embedding_dim
    assert isinstance(module, torch.nn.Linear)
    return module.out_features if tensor.base_name == "output" else module.in_features
