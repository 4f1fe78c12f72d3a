"""The modules of a checkpoint: their tensors, and how the config says they are quantized."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from torch import nn
from transformers import PreTrainedModel

from calipers.checkpoint.groups import group_of
from calipers.checkpoint.names import stored_names
from calipers.checkpoint.reader import build_unchecked
from calipers.checkpoint.sizes import noted_shape
from calipers.checkpoint.state import join
from calipers.checkpoint.ties import tied_names
from calipers.errors import CalipersError, damaged_file, library_errors
from calipers.files.safetensors_header import StoredTensor
from calipers.kernels.packing import IN_BYTES
from calipers.linting.contents import Contents
from calipers.linting.results import Finding
from calipers.linting.settings import format_of

_SIDES = {"weight": "weights", "input": "input_activations", "output": "output_activations"}
_STATES = ("q", "k", "v")
_KEYS_OF_ATTENTION = ("k_proj", "qkv_proj", "kv_b_proj", "query_key_value")
_OUTPUTS = ("output_scale", "output_zero_point")
_MORE_TENSORS = 1000
_QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class ModelNames:
    """What transformers knows of the model, by the names on disk; nothing where it knows it not.

    :param modules: each module with its name in memory
    :param shapes: those of all parameters that are stored as they are
    :param tied: parameters that need not be stored
    """

    modules: Mapping[str, tuple[str, nn.Module]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tied: frozenset[str] = frozenset()


@dataclass(frozen=True)
class StoredModule:
    """A module on disk.

    :param tensors: by their names in the module
    :param scheme: what the config says of it; None where it is to stay as it is
    :param states: how the states of attention are quantized, by q, k and v
    :param model_shape: that of its weight, where the model is known
    :param elsewhere: parameters of keys and values that older writers gave to their projections:
        of attention those that it need not have, of a projection those that it has for it
    """

    name: str
    tensors: Mapping[str, StoredTensor]
    scheme: QuantizationScheme | None = None
    form: CompressionFormat | None = None
    states: Mapping[str, QuantizationArgs] = field(default_factory=dict)
    model_shape: tuple[int, ...] | None = None
    elsewhere: frozenset[str] = frozenset()

    @property
    def weights(self) -> QuantizationArgs | None:
        """How its weight is quantized."""
        return None if self.scheme is None else self.scheme.weights

    @property
    def stores_codes(self) -> bool:
        """Whether there are codes instead of a weight."""
        weight = self.tensors.get("weight")
        is_code = weight is not None and weight.dtype in _QUANTIZED_DTYPES
        return is_code or "weight_packed" in self.tensors

    @property
    def codes(self) -> StoredTensor | None:
        """The tensor of its codes, by the name that the format has for it."""
        local = "weight" if self.form in IN_BYTES else "weight_packed"
        found = self.tensors.get(local)
        return found if self.stores_codes else None

    @property
    def sides(self) -> Iterator[tuple[str, QuantizationArgs]]:
        """All that is quantized of it, by the names that begin those of its parameters."""
        for side, key in _SIDES.items():
            args = getattr(self.scheme, key, None)
            if args is not None and not self.states:
                yield side, args
        yield from self.states.items()

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its weight: as the model has it or, of an unknown one, as files say."""
        return self.model_shape or self._stored_shape()

    def _stored_shape(self) -> tuple[int, ...] | None:
        codes = self.codes
        if codes is None or self.weights is None or len(codes.shape) < 2:
            return None
        *rows, width = codes.shape
        if self.form in IN_BYTES:
            return codes.shape
        if codes.dtype == torch.uint8:
            return (*rows, 2 * width)
        return self.noted_shape() or (*rows, width * 32 // self.weights.num_bits)

    def noted_shape(self) -> tuple[int, ...] | None:
        """Return what weight_shape holds, where it is of some use."""
        noted = self.tensors.get("weight_shape")
        return None if noted is None else noted_shape(noted)


def read_model(contents: Contents) -> tuple[ModelNames, list[Finding]]:
    """Build the model without values, if transformers knows it; say so if it does not."""
    try:
        with library_errors(lambda words: damaged_file(contents.folder / "config.json", words)):
            most = 4 * len(contents.tensors) + _MORE_TENSORS
            return _names_of(build_unchecked(contents.folder, most)), []
    except CalipersError as error:
        problem = f"does not let transformers build its model: {error.context.what}"
        hint = "Modules are known by their names alone; what targets mean by class may be wrong."
        return ModelNames(), [Finding("note", "model-unknown", "config.json", problem, hint)]


def _names_of(model: PreTrainedModel) -> ModelNames:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    named = {f"{name}.weight": name for name, _ in model.named_modules() if name}
    on_disk = stored_names(model, {**parameters, **named}).renamed
    modules = {
        on_disk[weight].removesuffix(".weight"): (name, model.get_submodule(name))
        for weight, name in named.items()
        if weight in on_disk
    }
    shapes = {on_disk[n]: tuple(p.shape) for n, p in parameters.items() if n in on_disk}
    tied = frozenset(on_disk[name] for name in tied_names(model) if name in on_disk)
    return ModelNames(modules, shapes, tied)


def read_modules(
    contents: Contents, settings: QuantizationConfig, model: ModelNames
) -> list[StoredModule]:
    """Return all modules that have tensors, or should have parameters of attention."""
    tensors: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, tensor in contents.tensors.items():
        module, _, local = name.rpartition(".")
        tensors[module][local] = tensor
    parts = (module.rpartition(".") for module in tensors)
    attention = {parent for parent, _, own in parts if own in _KEYS_OF_ATTENTION}
    file = contents.folder / "config.json"
    with library_errors(lambda words: damaged_file(file, f"targets or ignore: {words}")):
        found = [
            _module(name, tensors.get(name, {}), settings, model, name in attention)
            for name in dict.fromkeys([*tensors, *sorted(attention)])
        ]
    return _with_states_of_outputs(found) if settings.kv_cache_scheme is not None else found


def _with_states_of_outputs(modules: list[StoredModule]) -> list[StoredModule]:
    """Let output parameters of projections count as those of keys and values."""
    projections = {
        module.name: [local for local in _OUTPUTS if local in module.tensors]
        for module in modules
        if module.name.rpartition(".")[2] in ("k_proj", "v_proj")
    }
    found = []
    for module in modules:
        elsewhere = set(projections.get(module.name, ()))
        for side in module.states:
            outputs = projections.get(join(module.name, f"{side}_proj"), ())
            elsewhere |= {local.replace("output", side) for local in outputs}
        found.append(replace(module, elsewhere=frozenset(elsewhere)))
    return found


def _module(
    name: str,
    tensors: Mapping[str, StoredTensor],
    settings: QuantizationConfig,
    model: ModelNames,
    is_attention: bool,
) -> StoredModule:
    in_memory, module = model.modules.get(name, (name, _likely_class(name, tensors)))
    group = None if module is None else group_of(module, (name, in_memory), settings)
    scheme = None if group is None else settings.config_groups[group]
    shape = model.shapes.get(f"{name}.weight")
    if is_attention:
        return StoredModule(name, tensors, states=_states(scheme, settings))
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        scheme = None
    form = None if scheme is None else format_of(scheme, settings)
    return StoredModule(name, tensors, scheme, form, model_shape=shape)


def _likely_class(name: str, tensors: Mapping[str, StoredTensor]) -> nn.Module | None:
    """Return a module of the class that a module of an unknown model, or an expert, has."""
    weight = tensors.get("weight")
    if "weight_packed" not in tensors and (weight is None or len(weight.shape) != 2):
        return None
    with torch.device("meta"):
        return nn.Embedding(1, 1) if "embed" in name else nn.Linear(1, 1)


def _states(
    scheme: QuantizationScheme | None, settings: QuantizationConfig
) -> dict[str, QuantizationArgs]:
    if scheme is not None and scheme.weights is None and scheme.input_activations is not None:
        return dict.fromkeys(_STATES, scheme.input_activations)
    if settings.kv_cache_scheme is not None:
        return dict.fromkeys(_STATES[1:], settings.kv_cache_scheme)
    return {}
