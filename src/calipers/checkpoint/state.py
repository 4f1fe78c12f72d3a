"""The tensors of a model in memory, module by module, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.utils.internal import InternalModule
from torch import nn


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
