"""What steps make of a model: checked when a step answers, and applied here alone.

A model in memory gets all changes at once, when nothing can fail any more; one that goes from disk
to disk gets those of a few modules at a time, shortly before they are stored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import Any

import torch
from compressed_tensors.offload import OffloadCache, disable_offloading, disable_onloading
from compressed_tensors.quantization import (
    QuantizationScheme,
    QuantizationStatus,
    initialize_module_for_quantization,
)
from torch import Tensor

from calipers.calibration.context import expose_states
from calipers.checkpoint.state import join
from calipers.errors import ConfigurationError, listing, shortened
from calipers.numerics.qparams import store_qparams
from calipers.planning.plan import Changes
from calipers.planning.specs import ModuleSpec
from calipers.steps.base import Layer

# What a step answers


def check_changes(layer: Layer, step: str, changes: Changes) -> None:
    """Refuse changes to modules that a step was not given, and values that do not fit.

    :param layer: what the step was given
    """
    for name, tensor in (*changes.qparams, *changes.tensors):
        _check_module(layer, f"{step} changes '{join(name, tensor)}'", name)
    for name in changes.published:
        _check_module(layer, f"{step} publishes attributes of '{name}'", name)
    planned = {(module.name, each.base_name) for module in layer.modules for each in module.tensors}
    for name, tensor in changes.qparams.keys() - planned:
        raise ConfigurationError(
            f"{step} finds parameters of '{join(name, tensor)}', which it did not plan to quantize",
            hint="Name the module and its scheme in StepPlan.modules",
        )
    with disable_onloading():
        for (name, tensor), value in changes.tensors.items():
            what = f"{step} changes '{join(name, tensor)}'"
            module = layer.module(name)
            known = _tensors_of(module)
            if tensor not in known:
                problem = f"{what}, but {type(module).__name__} has no such tensor"
                raise ConfigurationError(problem, allowed=list(known))
            forms = [
                f"{each.dtype} of shape ({listing(map(str, each.shape))})"
                for each in (value, known[tensor])
            ]
            if forms[0] != forms[1]:
                raise ConfigurationError(
                    f"{what} to a value of another form: {forms[0]}",
                    hint=f"It must be {forms[1]}",
                )
    for name, attributes in changes.published.items():
        own = _tensors_of(layer.module(name)).keys() & attributes.keys()
        if own:
            raise ConfigurationError(
                f"{step} publishes '{join(name, min(own))}', which is a tensor of the module",
                hint="Return its new value in Changes.tensors",
            )


def _check_module(layer: Layer, what: str, name: str) -> None:
    if name not in layer.names:
        known = dict(layer.model.named_modules())
        raise ConfigurationError(
            f"{what}, but it was not given this module"
            if name in known
            else f"{what}, but {type(layer.model).__name__} has no such module",
            hint="A step gets the modules that its plan names. Add it to StepPlan.changed. It was "
            f"given {shortened(layer.names, 3)}",
        )


def _tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    both: Iterable[tuple[str, Tensor | None]] = (
        (name, tensors[name])
        for tensors in (module._parameters, module._buffers)
        for name in tensors
    )
    return {name: tensor for name, tensor in both if tensor is not None}


# What becomes of a model


def give_schemes(model: torch.nn.Module, modules: Iterable[ModuleSpec]) -> None:
    """Give modules their schemes, and room for the parameters, as compressed-tensors calls them."""
    schemes: dict[int, QuantizationScheme] = {}
    for planned in modules:
        if id(planned.scheme) not in schemes:
            schemes[id(planned.scheme)] = copy.deepcopy(planned.scheme)
        module = model.get_submodule(planned.name)
        expose_states(model, module, planned.kind)
        vars(module)["quantization_scheme"] = schemes[id(planned.scheme)]
        initialize_module_for_quantization(module, force_zero_point=planned.kind != "kv_cache")
        if isinstance(module._parameters, OffloadCache):
            _load_once(module)
        vars(module)["quantization_status"] = QuantizationStatus.FROZEN


def apply_changes(
    model: torch.nn.Module,
    modules: Iterable[ModuleSpec],
    changes: Changes,
    ties: Mapping[str, str],
) -> Mapping[str, Tensor]:
    """Give modules, which have their schemes, the tensors, parameters and attributes of changes.

    Returns the codes of weights, without those of weights that another, tied one has replaced.

    :param modules: those that are quantized, of the ones that are changed
    :param ties: each tied copy, with the tensor that is stored in its place; both become the same
    """
    tied = {
        source: (source, *(copy for copy in ties if ties[copy] == source))
        for source in ties.values()
    }
    codes = dict(changes.codes)
    for (name, local), value in changes.tensors.items():
        module, place = model.get_submodule(name), join(name, local)
        old = module._parameters.get(local)
        if old is None:
            new = value.to(module.get_buffer(local).device)
        else:
            new = torch.nn.Parameter(value.to(old.device), requires_grad=old.requires_grad)
        for one in tied.get(ties.get(place, place), (place,)):
            owner, _, own = one.rpartition(".")
            setattr(model.get_submodule(owner), own, new)
            if own == "weight" and owner != name:
                codes.pop(owner, None)
    for planned in modules:
        module = model.get_submodule(planned.name)
        for tensor in planned.tensors:
            qparams = changes.qparams.get((planned.name, tensor.base_name))
            if qparams is not None:
                store_qparams(module, tensor.base_name, qparams)
            for name in tensor.importance.published:  # they have served
                vars(module).pop(name, None)
    for name, attributes in changes.published.items():
        vars(model.get_submodule(name)).update(attributes)
    return codes


def _load_once(module: Any) -> None:
    """Let the forward of an offloaded module see one weight, not another each time it looks."""
    quantized = module._original_forward_func

    @wraps(quantized)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with disable_offloading():
            return quantized(self, *args, **kwargs)

    module._original_forward_func = forward
