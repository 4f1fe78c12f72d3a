"""The one reader of quantized checkpoints: what lint, report, show and evaluate know of them."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.base import QUANTIZATION_METHOD
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
)
from torch import nn
from transformers import PreTrainedModel

from calipers.checkpoint.auxiliary_files import NOTES
from calipers.checkpoint.config import group_of
from calipers.checkpoint.headers import (
    INDEX,
    SINGLE,
    IndexDefect,
    bits_per_weight,
    readable_tensors,
    stored_tensors,
)
from calipers.checkpoint.location import check_location
from calipers.checkpoint.reader import build_unchecked
from calipers.checkpoint.state import stored_names, tied_names
from calipers.checkpoint.stored_module import StoredModule
from calipers.errors import (
    CalipersError,
    ConfigurationError,
    cannot_load,
    damaged_file,
    library_errors,
)
from calipers.files.reading import read_json_object
from calipers.files.safetensors_header import StoredTensor
from calipers.judging.costs import ModuleCosts
from calipers.kernels.rounding import IN_BYTES, IN_PAIRS, IN_WORDS
from calipers.topology.names import KEY_PROJECTIONS, is_embedding, projection_of

_STATES = ("q", "k", "v")
_OUTPUTS = ("output_scale", "output_zero_point")
_MORE_TENSORS = 1000


@dataclass(frozen=True)
class ModelNames:
    """What transformers knows of the model, by the names on disk; nothing where it knows it not.

    :param modules: each module with its name in memory
    :param shapes: those of all parameters that are stored as they are
    :param tied: parameters that need not be stored
    :param problem: why transformers cannot build the model
    """

    modules: Mapping[str, tuple[str, nn.Module]] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tied: frozenset[str] = frozenset()
    problem: str = ""

    @classmethod
    def of(cls, model: PreTrainedModel) -> ModelNames:
        """Return the names of a model, which needs no values."""
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
        return cls(modules, shapes, tied)


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A checkpoint in a format of compressed-tensors, as its files have it.

    Opening it reads headers alone; a tensor is read when it is asked for.

    :param name: of the folder
    :param config: what ``config.json`` says
    :param settings: how it is quantized, by its config
    :param tensors: all tensors, by their names on disk
    :param index_defects: what is wrong with the index of its files
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    settings: QuantizationConfig
    tensors: Mapping[str, StoredTensor]
    index_defects: tuple[IndexDefect, ...] = ()

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, name: str | None = None, damaged: bool = False
    ) -> QuantizedCheckpoint:
        """Open a folder; refuse one that holds no quantized checkpoint.

        :param damaged: whether its index, and files beside it, may be damaged: what is there is
            read then, and ``index_defects`` tell the rest
        """
        folder = Path(path)
        if not folder.is_dir():
            problem = "it is a file" if folder.exists() else "there is no such folder"
            raise cannot_load(str(folder), problem, "checkpoint")
        if not damaged:
            check_location(str(folder))
        if not (folder / "config.json").is_file():
            raise cannot_load(str(folder), "there is no config.json in it")
        config = read_json_object(folder / "config.json")
        settings = _read_settings(folder, config)
        if not any((folder / file).is_file() for file in (SINGLE, INDEX)):
            raise damaged_file(folder, f"there is neither {SINGLE} nor {INDEX} in it")
        tensors, defects = readable_tensors(folder) if damaged else (stored_tensors(folder), [])
        name = Path(os.path.realpath(folder)).name if name is None else name
        return cls(folder, name, config, settings, tensors, tuple(defects))

    @cached_property
    def model(self) -> ModelNames:
        """The model of its config, which is built without values, if transformers knows it."""
        try:
            with library_errors(lambda words: damaged_file(self.folder / "config.json", words)):
                most = 4 * len(self.tensors) + _MORE_TENSORS
                return ModelNames.of(build_unchecked(self.folder, most))
        except CalipersError as error:
            return ModelNames(problem=f"{error.context.what}")

    @cached_property
    def modules(self) -> Mapping[str, StoredModule]:
        """All modules that have tensors, or should have parameters of attention, by their names."""
        tensors: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
        for name, tensor in self.tensors.items():
            owner, _, local = name.rpartition(".")
            tensors[owner][local] = tensor
        parts = (name.rpartition(".") for name in tensors)
        attention = {parent for parent, _, own in parts if own in KEY_PROJECTIONS}
        file = self.folder / "config.json"
        with library_errors(lambda words: damaged_file(file, f"targets or ignore: {words}")):
            modules = {
                name: self._module(name, tensors.get(name, {}), name in attention)
                for name in dict.fromkeys([*tensors, *sorted(attention)])
            }
        if self.settings.kv_cache_scheme is None:
            return modules
        # Older writers gave the parameters of keys and values to the outputs of their projections.
        kept = {projection_of(parent, side) for parent in attention for side in _STATES[1:]}
        projections = {
            name: [local for local in _OUTPUTS if local in module.tensors]
            for name, module in modules.items()
            if name in kept
        }
        elsewhere = {name: set(projections.get(name, ())) for name in modules}
        for name, module in modules.items():
            for side in module.states:
                outputs = projections.get(projection_of(name, side), ())
                elsewhere[name] |= {local.replace("output", side) for local in outputs}
        return {n: replace(m, elsewhere=frozenset(elsewhere[n])) for n, m in modules.items()}

    @cached_property
    def quantized(self) -> dict[str, StoredModule]:
        """Those modules that the config means, and that have parameters of quantization."""
        marks = {"weight_packed", "weight_scale", "input_scale", "output_scale"}
        return {
            name: module
            for name, module in self.modules.items()
            if module.scheme is not None and marks & set(module.tensors)
        }

    @cached_property
    def weights(self) -> dict[str, StoredModule]:
        """Those modules whose weights are stored as the codes that the config means."""
        return {
            name: module
            for name, module in self.quantized.items()
            if module.weights is not None and module.stores_codes
        }

    @property
    def bits_per_weight(self) -> float | None:
        """The bits that a quantized weight takes, scales included; None if there is none."""
        shapes = {name: m.shape for name, m in self.weights.items() if m.shape is not None}
        return bits_per_weight(self.tensors, shapes)

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def has_notes(self) -> bool:
        """Whether Calipers has written it."""
        return (self.folder / NOTES).is_file()

    @cached_property
    def notes(self) -> Mapping[str, Any]:
        """What Calipers wrote of it into ``calipers.json``; empty where there is none."""
        return read_json_object(self.folder / NOTES) if self.has_notes else {}

    def _module(
        self, name: str, tensors: Mapping[str, StoredTensor], is_attention: bool
    ) -> StoredModule:
        if name in self.model.modules:
            in_memory, module = self.model.modules[name]
        else:  # of an unknown model, or an expert: its class is told by its tensors
            in_memory, weight = name, tensors.get("weight")
            is_matrix = weight is not None and len(weight.shape) == 2
            with torch.device("meta"):
                module = nn.Embedding(1, 1) if is_embedding(name) else nn.Linear(1, 1)
            if "weight_packed" not in tensors and not is_matrix:
                module = None
        group = None if module is None else group_of(module, (name, in_memory), self.settings)
        scheme = None if group is None else self.settings.config_groups[group]
        settings = self.settings
        if is_attention:
            states: dict[str, QuantizationArgs] = {}
            inputs = None if scheme is None else scheme.input_activations
            if scheme is not None and scheme.weights is None and inputs is not None:
                states = dict.fromkeys(_STATES, inputs)
            elif settings.kv_cache_scheme is not None:
                states = dict.fromkeys(_STATES[1:], settings.kv_cache_scheme)
            return StoredModule(name, tensors, states=states)
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            scheme = None
        form = None
        if scheme is not None and scheme.weights is not None:
            form = CompressionFormat(scheme.format or settings.format)
            if scheme.format is None and form is CompressionFormat.mixed_precision:
                form = CompressionFormat(infer_module_format(nn.Linear, scheme))
        shape = self.model.shapes.get(f"{name}.weight")
        return StoredModule(name, tensors, scheme, form, model_shape=shape)


def parse_settings(content: Mapping[str, Any]) -> QuantizationConfig:
    """Return what a ``quantization_config`` says; keys of the library and of sparsity are left out.

    Every version of compressed-tensors since 0.17 writes what is read here.
    """
    known = {key: value for key, value in content.items() if key in QuantizationConfig.model_fields}
    return QuantizationConfig.model_validate({"config_groups": {}, **known})


def _read_settings(folder: Path, config: Mapping[str, Any]) -> QuantizationConfig:
    file, keys = folder / "config.json", ("quantization_config", "compression_config")
    content = next((config[key] for key in keys if config.get(key) is not None), None)
    if content is None:
        raise _refused(folder, "is not quantized: its config has no quantization_config")
    if not isinstance(content, dict):
        raise damaged_file(file, f"'quantization_config' must be an object, got {content!r}")
    method = content.get("quant_method", QUANTIZATION_METHOD)
    if method != QUANTIZATION_METHOD:
        raise _refused(folder, f"is quantized in the way of '{method}', not of compressed-tensors")
    with library_errors(lambda words: damaged_file(file, f"quantization_config: {words}")):
        settings = parse_settings(content)
    known = {form.value for form in IN_WORDS | IN_PAIRS | IN_BYTES}
    mixed, dense = CompressionFormat.mixed_precision.value, CompressionFormat.dense.value
    with_weights = [group for group in settings.config_groups.values() if group.weights is not None]
    if settings.format == dense and not with_weights:
        if settings.kv_cache_scheme is None and not settings.config_groups:
            raise _refused(folder, "is not quantized: its quantization_config names nothing")
        return settings
    for named in (settings.format, *(group.format for group in with_weights if group.format)):
        form = getattr(named, "value", named)
        if form in (dense, "fakequant"):
            raise _refused(folder, f"holds weights that are not quantized (format '{form}')")
        if form not in known | {mixed}:
            raise _refused(folder, f"has the format '{form}', which is not known here")
    return settings


def _refused(folder: Path, what: str) -> ConfigurationError:
    hint = "Give the folder of a checkpoint in one of the formats of compressed-tensors."
    return ConfigurationError(what, subject=f"The checkpoint '{folder}'", hint=hint)


def is_error(value: object) -> bool:
    """Whether a value is a finite number that is not negative."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]


def recorded_costs(checkpoint: QuantizedCheckpoint) -> dict[str, ModuleCosts]:
    """Return the costs of modules that calipers.json holds; refuse damaged ones."""
    file, recorded = checkpoint.folder / NOTES, checkpoint.notes.get("costs", {})
    if not isinstance(recorded, dict):
        raise damaged_file(file, "'costs' must be an object")
    try:
        costs = {name: ModuleCosts.from_dict(content) for name, content in recorded.items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise damaged_file(file, f"'costs' are not those of modules ({error})") from error
    for name, cost in costs.items():
        shares = (cost.weight, cost.input, cost.typical_input)
        figures = [share for share in shares if share is not None]
        for tensor in cost.tensors.values():
            figures += [value for value in vars(tensor).values() if not isinstance(value, bool)]
        if not all(map(is_error, figures)):
            raise damaged_file(file, f"the costs of '{name}' are no finite numbers")
    return costs
