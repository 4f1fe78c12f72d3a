"""The tensors of a model: where they are in memory, which are tied, and their names on disk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.quantization.utils import is_module_quantized
from compressed_tensors.utils.internal import InternalModule
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from calipers.topology.experts import unfused_experts
from calipers.topology.model import declared_ties, says_tied
from calipers.topology.names import EXPERT_PROJECTIONS


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Go through the modules that the model's definition has, not those put in to quantize."""
    internal: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, InternalModule):
            internal.append(f"{name}.")
        elif not name.startswith(tuple(internal)):
            yield name, module


def module_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a module itself, loaded if offloaded."""
    hidden = module._non_persistent_buffers_set
    state: dict[str, torch.Tensor | None] = {n: module._parameters[n] for n in module._parameters}
    state |= {n: module._buffers[n] for n in module._buffers if n not in hidden}
    return {name: tensor for name, tensor in state.items() if tensor is not None}


def offloaded_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of a model where they are; those on disk have a shape and no values."""
    with disable_onloading():
        return {
            join(prefix, name): tensor
            for prefix, module in own_modules(model)
            for name, tensor in module_state(module).items()
        }


def owner_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module that a tensor belongs to."""
    return model.get_submodule(name.rpartition(".")[0])


def read_tensor(model: nn.Module, name: str) -> torch.Tensor:
    """Return one tensor, loaded."""
    return module_state(owner_of(model, name))[name.rpartition(".")[2]]


def join(prefix: str, name: str) -> str:
    """Return the full name of a tensor of a module; the model itself has no name."""
    return f"{prefix}.{name}" if prefix else name


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Map each tied copy to the tensor that is stored in its place."""
    tensors = offloaded_tensors(model)
    tied: dict[str, str] = {}
    for copied, source in declared_ties(model, tensors.keys()):
        if source not in tensors or _is_quantized(model, copied, source):
            continue
        one, other = tensors[copied], tensors[source]
        shares = one is other
        if not shares and (one.shape, one.dtype) == (other.shape, other.dtype):
            shares = one.device.type != "meta" and one.data_ptr() == other.data_ptr()
            # Offloading makes two tensors of one. They are still tied if the model says so.
            if not shares and says_tied(model):
                shares = torch.equal(read_tensor(model, copied), read_tensor(model, source))
        if shares:
            tied[copied] = source
    return tied


def unquantized_ties(model: PreTrainedModel, ties: Mapping[str, str]) -> dict[str, str]:
    """Return those of a model's ties that are left: quantized tensors are no longer tied."""
    return {
        copied: source
        for copied, source in ties.items()
        if not _is_quantized(model, copied, source)
    }


def _is_quantized(model: PreTrainedModel, *names: str) -> bool:
    return any(is_module_quantized(owner_of(model, name)) for name in names)


@dataclass(frozen=True)
class StoredNames:
    """Where each tensor of a model goes.

    :param renamed: the name on disk of each tensor that is stored as it is
    :param converted: names of tensors that transformers converts together, by any one of them
    """

    renamed: Mapping[str, str]
    converted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def stored_names(model: PreTrainedModel, names: Iterable[str]) -> StoredNames:
    """Find the names on disk of all tensors of a model, by the model's own conversions."""
    experts = expert_names(model)
    reverse = [transform.reverse_transform() for transform in reversed(_conversions_of(model))]
    renamings = [transform for transform in reverse if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in reverse if isinstance(transform, WeightConverter)]
    renamed: dict[str, str] = {}
    groups: dict[str, list[str]] = defaultdict(list)
    # Some renamings wait for another name to come first: this order is the one they are made for.
    for name in sorted(names, key=dot_natural_key):
        module, _, tensor = name.rpartition(".")
        if module in experts:
            renamed[name] = f"{experts[module]}.{tensor}"
            continue
        stored, pattern = rename_source_key(name, renamings, converters, reverse=True)
        if pattern is None:
            renamed[name] = stored
        else:
            groups[stored].append(name)
    converted = {name: tuple(group) for group in groups.values() for name in group}
    return StoredNames(renamed, converted)


def stored_module_names(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Return the names on disk of modules."""
    weights = {f"{name}.weight": name for name in names}
    stored = stored_names(model, weights).renamed
    return {name: stored.get(w, w).removesuffix(".weight") for w, name in weights.items()}


def converted_back(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Convert tensors into those that the original layout holds instead, with their names."""
    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def _conversions_of(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversions that were used to load the model, or would be."""
    used = getattr(model, "_weight_conversions", None)
    return _default_conversions(model) if used is None else list(used)


def _default_conversions(model: PreTrainedModel) -> list[WeightTransform]:
    # Whether the original had a prefix is known only from loading it.
    known = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in known if not isinstance(transform, PrefixChange)]


def expert_names(model: PreTrainedModel) -> dict[str, str]:
    """Return the names on disk of the projections of experts that are modules of their own.

    The model's conversions speak of fused experts only. So a fused tensor that holds nothing but
    the number of each expert and projection is converted, and the numbers read from the result.
    """
    marks: dict[str, torch.Tensor] = {}
    modules: list[str] = []
    for name, count in unfused_experts(model).items():
        first = len(modules)
        first_expert = model.get_submodule(f"{name}.0")
        parts = [part for part in EXPERT_PROJECTIONS if hasattr(first_expert, part)]
        gated = len(parts) == len(EXPERT_PROJECTIONS)
        modules += [f"{name}.{i}.{part}" for i in range(count) for part in parts]
        numbers = torch.arange(first, len(modules)).view(count, len(parts), 1)
        up = f"{name}.gate_up_proj" if gated else f"{name}.up_proj"
        marks[up] = numbers[:, :-1].expand(-1, -1, 2).contiguous()
        marks[f"{name}.down_proj"] = numbers[:, -1:].expand(-1, -1, 2).contiguous()
    if not marks:
        return {}
    names: dict[str, str] = {}
    shadow: Any = copy(model)
    # A model loaded from fused experts does not know how others store them; its class does.
    for conversions in (_default_conversions(model), _conversions_of(model)):
        # Not by setattr, which would register modules; the copy has its own __dict__.
        shadow.__dict__["_weight_conversions"] = [
            transform
            for transform in conversions
            if isinstance(transform, WeightRenaming)
            or any("*" in pattern for pattern in transform.source_patterns)  # it splits a tensor
        ]
        for stored, mark in converted_back(shadow, marks).items():
            alone = set(mark.flatten().tolist())
            if len(alone) == 1 and stored.endswith(".weight"):
                names[modules[alone.pop()]] = stored.removesuffix(".weight")
    return names
