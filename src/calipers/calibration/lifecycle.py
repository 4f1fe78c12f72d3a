"""The life of a quantized module: it gets observers, is watched, gets its parameters, is frozen.

These are the steps for those who want to take them one by one; the engine does the same for whole
models. The module comes with its ``quantization_scheme``, and with parameters to be set, from
``initialize_module_for_quantization`` of compressed-tensors.

>>> import torch
>>> from compressed_tensors.quantization import (
...     initialize_module_for_quantization, preset_name_to_scheme)
>>> linear = torch.nn.Linear(4, 2)
>>> initialize_module_for_quantization(linear, preset_name_to_scheme("FP8", ["Linear"]))
>>> initialize_observer(linear, "weight"); initialize_observer(linear, "input")
>>> calibrate_input_hook(linear, (torch.full((1, 4), 448.0),))
>>> observe(linear, "weight"); update_qparams(linear, ["weight", "input"])
>>> freeze_module_quantization(linear)
>>> linear.input_scale, linear.quantization_status.value
(Parameter containing: tensor([1.]), 'frozen')
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStatus
from torch import Tensor

from calipers.errors import ConfigurationError, no_statistics
from calipers.numerics.qparams import store_qparams
from calipers.numerics.tensors import first_tensor, mask_for
from calipers.observers import Observer
from calipers.observers.spec import ObserverSpec
from calipers.planning.specs import args_for

OBSERVED = ("weight", "input", "output", "q", "k", "v")
"""What a module may have an observer for."""


def initialize_observer(module: torch.nn.Module, base_name: str, *, name: str = "") -> None:
    """Give a module the observer its scheme asks for, as the submodule ``<base_name>_observer``.

    :param name: what messages call the module
    """
    args = args_for(getattr(module, "quantization_scheme", None), base_name)
    spec = None if args is None else ObserverSpec.resolve(base_name, args)
    if spec is None:
        return
    observer = spec.build(name)
    module.register_module(f"{base_name}_observer", observer)
    observer.attach(module)


def observer_of(module: torch.nn.Module, base_name: str) -> Observer | None:
    """Return the observer of a tensor of a module, if there is one."""
    found = getattr(module, f"{base_name}_observer", None)
    return found if isinstance(found, Observer) else None


# Hooks. Each looks at a tensor and changes nothing.


def calibrate_input_hook(
    module: torch.nn.Module, args: Any, kwargs: dict[str, Any] | None = None
) -> None:
    """Show the input of a module to its observer: a forward-pre hook, with or without kwargs."""
    _show(module, "input", first_tensor((args, kwargs or {})))


def calibrate_output_hook(module: torch.nn.Module, _args: Any, output: Any) -> None:
    """Show the output of a module to its observer: a forward hook."""
    _show(module, "output", first_tensor(output))


def calibrate_query_hook(module: torch.nn.Module, states: Tensor) -> None:
    """Show queries, after their positions are put in, to the observer of an attention module."""
    _show(module, "q", states)


def calibrate_key_hook(module: torch.nn.Module, states: Tensor) -> None:
    """Show keys, as they enter the cache, to the observer of an attention module."""
    _show(module, "k", states)


def calibrate_value_hook(module: torch.nn.Module, states: Tensor) -> None:
    """Show values, as they enter the cache, to the observer of an attention module."""
    _show(module, "v", states)


def _show(module: torch.nn.Module, base_name: str, tensor: Tensor | None) -> None:
    observer = observer_of(module, base_name)
    if observer is None:
        raise ConfigurationError(
            f"{type(module).__name__} has no observer for '{base_name}'",
            hint=f"Call initialize_observer(module, '{base_name}') before the model runs",
        )
    if tensor is not None and tensor.numel():
        observer(tensor, mask=mask_for(tensor, base_name, observer.label()))


# Parameters


def observe(module: torch.nn.Module | Iterable[torch.nn.Module], base_name: str) -> None:
    """Show a tensor that a module holds, such as its weight, to its observer."""
    for each in [module] if isinstance(module, torch.nn.Module) else module:
        observer = observer_of(each, base_name)
        if observer is not None:
            observer(getattr(each, base_name))


def update_qparams(
    module: torch.nn.Module | Iterable[torch.nn.Module], base_name: str | Iterable[str]
) -> None:
    """Work out the parameters of tensors from what their observers saw, and store them."""
    names = [base_name] if isinstance(base_name, str) else list(base_name)
    for each in [module] if isinstance(module, torch.nn.Module) else module:
        for name in names:
            observer = observer_of(each, name)
            if observer is None:
                continue
            if not observer.has_statistics:
                raise no_statistics(observer.label())
            store_qparams(each, name, observer.get_qparams())


def freeze_module_quantization(module: torch.nn.Module) -> None:
    """Take the observers away; the parameters stay. For use with ``model.apply``."""
    if getattr(module, "quantization_scheme", None) is None:
        return
    for base_name in OBSERVED:
        observer = observer_of(module, base_name)
        if observer is not None:
            observer.detach(module)
            delattr(module, f"{base_name}_observer")
    module.quantization_status = QuantizationStatus.FROZEN
