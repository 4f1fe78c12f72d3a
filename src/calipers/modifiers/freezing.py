"""A model gets its parameters, and from then on computes as if it were quantized."""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import torch
from compressed_tensors.offload import OffloadCache, disable_offloading
from compressed_tensors.quantization import (
    QuantizationScheme,
    QuantizationStatus,
    initialize_module_for_quantization,
)
from torch import Tensor

from calipers.calibration.attention import expose_states
from calipers.calibration.lifecycle import store_qparams
from calipers.modifiers.steps import Changes, QParams
from calipers.planning.plan import Plan
from calipers.planning.specs import ModuleSpec


def freeze(model: torch.nn.Module, plan: Plan, changes: Changes) -> None:
    """Give the modules of a plan their schemes, weights and parameters.

    They have the names that compressed-tensors uses. The model then computes with fake
    quantization.
    """
    for name, weight in changes.weights.items():
        replace_weight(model.get_submodule(name), weight)
    schemes: dict[int, QuantizationScheme] = {}
    for planned in plan.modules:
        if id(planned.scheme) not in schemes:
            schemes[id(planned.scheme)] = copy.deepcopy(planned.scheme)
        module = model.get_submodule(planned.name)
        _prepare(model, module, planned, schemes[id(planned.scheme)])
        _store(module, planned, changes.qparams)
        vars(module)["quantization_status"] = QuantizationStatus.FROZEN
    for name, attributes in changes.published.items():
        vars(model.get_submodule(name)).update(attributes)


def replace_weight(module: torch.nn.Module, weight: Tensor) -> None:
    """Put another weight in the place of that of a module; the old one is not touched."""
    old = module.get_parameter("weight")
    new = weight.to(old.device, old.dtype)
    module.weight = torch.nn.Parameter(new, requires_grad=old.requires_grad)


def _store(module: torch.nn.Module, planned: ModuleSpec, qparams: QParams) -> None:
    for tensor in planned.tensors:
        if (planned.name, tensor.base_name) in qparams:
            store_qparams(module, tensor.base_name, qparams[planned.name, tensor.base_name])
        if tensor.base_name == "weight" and tensor.observer is not None:
            for name in tensor.observer.importance.fields:  # they have served
                vars(module).pop(name, None)


def _prepare(
    model: torch.nn.Module,
    module: torch.nn.Module,
    planned: ModuleSpec,
    scheme: QuantizationScheme,
) -> None:
    """Let compressed-tensors create the parameters of a module and wrap its forward."""
    expose_states(model, module, planned.kind)
    vars(module)["quantization_scheme"] = scheme
    initialize_module_for_quantization(module, force_zero_point=planned.kind != "kv_cache")
    if isinstance(module._parameters, OffloadCache):
        _load_once(module)


def _load_once(module: Any) -> None:
    """Let the forward of an offloaded module see one weight, not another each time it looks."""
    quantized = module._original_forward_func

    @wraps(quantized)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with disable_offloading():
            return quantized(self, *args, **kwargs)

    module._original_forward_func = forward
