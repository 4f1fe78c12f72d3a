"""A model gets its parameters, and from then on computes as if it were quantized."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from compressed_tensors.offload import OffloadCache, disable_offloading
from compressed_tensors.quantization import (
    QuantizationScheme,
    QuantizationStatus,
    initialize_module_for_quantization,
)

from calipers.calibration.lifecycle import expose_states, store_qparams
from calipers.calibration.plan import Plan, PlannedModule
from calipers.calibration.snapshot import unchanged_on_error
from calipers.observers import QParamsDict

QParams = Mapping[tuple[str, str], QParamsDict]
"""(module, tensor) → its parameters."""


def freeze(model: torch.nn.Module, plan: Plan, qparams: QParams) -> None:
    """Give the modules of a plan their schemes and parameters.

    They have the names that compressed-tensors uses. The model then computes with fake
    quantization; if anything fails, it is left as it was.
    """
    schemes: dict[int, QuantizationScheme] = {}
    with unchanged_on_error(model):
        for planned in plan.modules:
            if id(planned.scheme) not in schemes:
                schemes[id(planned.scheme)] = copy.deepcopy(planned.scheme)
            module = model.get_submodule(planned.name)
            _prepare(model, module, planned, schemes[id(planned.scheme)])
            for tensor in planned.tensors:
                if (planned.name, tensor.base_name) in qparams:
                    found = qparams[planned.name, tensor.base_name]
                    store_qparams(module, tensor.base_name, found)
                for name in tensor.sums:  # they have served
                    vars(module).pop(name, None)
            vars(module)["quantization_status"] = QuantizationStatus.FROZEN


def _prepare(
    model: torch.nn.Module,
    module: torch.nn.Module,
    planned: PlannedModule,
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
