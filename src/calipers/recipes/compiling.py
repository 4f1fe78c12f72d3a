"""From the modifiers of a recipe to a plan: every claim settled, every tensor checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils import get_head_dim, get_num_attn_heads, get_num_kv_heads

from calipers.calibration.plan import (
    SCHEME_FIELDS,
    Plan,
    PlannedModule,
    PlannedTensor,
    args_for,
)
from calipers.errors import (
    AlreadyQuantizedError,
    CalipersError,
    ClaimError,
    ModulesDivisibilityError,
    UnfitError,
    UnmatchedPatternError,
    group_sizes_for,
)
from calipers.modifiers import IMatrixGatherer, Modifier, QuantizationModifier
from calipers.modifiers.changes import has_free_groups
from calipers.modifiers.matching import what_there_is
from calipers.numerics.layout import Layout

Named = Sequence[tuple[str, Modifier]]


def compile_modifiers(named: Named, model: torch.nn.Module) -> Plan:
    """Merge what the modifiers want of a model.

    :param named: the modifiers, each with what messages call it
    """
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    claims = _Claims()
    gathered: set[str] = set()
    for label, modifier in named:
        if isinstance(modifier, QuantizationModifier):
            for module in modifier.planned_modules(model):
                claims.add(label, module)
        elif isinstance(modifier, IMatrixGatherer):
            gathered.update(modifier.gathered_modules(model))
    modules = sorted(claims.modules(), key=lambda module: order[module.name])
    if not modules and not gathered:
        raise UnmatchedPatternError(
            f"The recipe quantizes nothing in {type(model).__name__}: no module that can be "
            f"quantized matches. {what_there_is(model)}"
        )
    _check(model, modules)
    return Plan(tuple(modules), tuple(sorted(gathered, key=order.__getitem__)))


class _Claims:
    """Who quantizes which tensor."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, str], str] = {}
        self._modules: dict[str, PlannedModule] = {}

    def add(self, label: str, module: PlannedModule) -> None:
        """Take a claim; a tensor that is claimed already is an error."""
        for tensor in module.tensors:
            key = (module.name, tensor.base_name)
            if key in self._owners:
                raise ClaimError(".".join(key), self._owners[key], label)
            self._owners[key] = label
        known = self._modules.get(module.name)
        self._modules[module.name] = module if known is None else _merged(known, module)

    def modules(self) -> list[PlannedModule]:
        """Return the modules, each with all that is claimed of it."""
        return list(self._modules.values())


def _merged(one: PlannedModule, other: PlannedModule) -> PlannedModule:
    """Join the claims of two modifiers on different tensors of one Linear module."""
    assert one.kind == other.kind == "linear"
    args = {
        field: args_for(one.scheme, base) or args_for(other.scheme, base)
        for base, field in SCHEME_FIELDS.items()
    }
    same = one.scheme.targets == other.scheme.targets
    targets = list(one.scheme.targets) if same else [one.name]
    fmt = one.scheme.format or other.scheme.format
    return PlannedModule(one.name, QuantizationScheme(targets=targets, format=fmt, **args))


def _check(model: torch.nn.Module, planned: Sequence[PlannedModule]) -> None:
    """Refuse tensors that cannot be quantized as planned."""
    quantized = [
        each.name
        for each in planned
        if getattr(model.get_submodule(each.name), "quantization_scheme", None) is not None
    ]
    if quantized:
        raise AlreadyQuantizedError(quantized)
    indivisible: list[tuple[str, str, int, int]] = []
    grouped: list[int] = []  # the sizes that groups cut, where another size can be chosen
    seen: set[tuple[str, int]] = set()  # thousands of modules share a few arguments
    for each in planned:
        module = model.get_submodule(each.name)
        if each.kind != "linear":
            _check_heads(model, each)
        for tensor in each.tensors:
            _check_module(module, tensor)
            if (tensor.base_name, id(tensor.args)) not in seen:
                _check_args(tensor)
                seen.add((tensor.base_name, id(tensor.args)))
            unfit = list(_indivisible(module, tensor))
            indivisible.extend(unfit)
            if tensor.base_name == "weight" and has_free_groups(tensor.args):
                grouped.append(_size(module, tensor))
            elif unfit:
                grouped.append(1)  # no other size helps here
    if indivisible:
        raise ModulesDivisibilityError(indivisible, group_sizes_for(math.gcd(*grouped)))


def _check_module(module: torch.nn.Module, tensor: PlannedTensor) -> None:
    if tensor.base_name == "input" and isinstance(module, torch.nn.Embedding):
        problem = "the input of an Embedding is token ids. Quantize its weights only."
        raise UnfitError(tensor.module, tensor.base_name, problem)


def _check_heads(model: Any, planned: PlannedModule) -> None:
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


def _check_args(tensor: PlannedTensor) -> None:
    """Ask the layout and the observer whether they take the tensor."""
    if tensor.base_name == "weight" and tensor.args.dynamic:
        problem = "a weight does not change while the model runs. Set 'dynamic: false'."
        raise UnfitError(tensor.module, tensor.base_name, problem)
    if tensor.args.actorder is not None:
        problem = "'actorder' is for GPTQ, which orders columns; observers do not. Leave it out."
        raise UnfitError(tensor.module, tensor.base_name, problem)
    try:
        Layout.of(tensor.base_name, tensor.args)
        _ = tensor.observer
    except CalipersError as error:
        raise UnfitError(tensor.module, tensor.base_name, error) from error


def _indivisible(
    module: torch.nn.Module, tensor: PlannedTensor
) -> Iterator[tuple[str, str, int, int]]:
    """Yield the tensor with its size and that of its groups, if they do not fit."""
    if tensor.base_name in ("q", "k", "v"):
        return
    size = _size(module, tensor)
    blocks = tensor.args.block_structure
    group_size = blocks[1] if blocks else tensor.args.group_size or 0
    if group_size > 0 and size % group_size:
        yield tensor.module, tensor.base_name, size, group_size


def _size(module: torch.nn.Module, tensor: PlannedTensor) -> int:
    """Return the size of the dimension that groups cut."""
    with disable_onloading():
        weight = module.weight
    assert isinstance(weight, torch.Tensor)
    is_linear = isinstance(module, torch.nn.Linear)
    return weight.shape[0] if tensor.base_name == "output" and is_linear else weight.shape[-1]
