"""config.json: the model's own, and how its checkpoint is quantized."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compressed_tensors
from compressed_tensors.base import (
    COMPRESSION_VERSION_NAME,
    QUANTIZATION_CONFIG_NAME,
    QUANTIZATION_METHOD,
    QUANTIZATION_METHOD_NAME,
    SPARSITY_CONFIG_NAME,
    TRANSFORM_CONFIG_NAME,
)
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.compressed_tensors import get_experts_scheme

from calipers.checkpoint.compression import module_format, scheme_of
from calipers.checkpoint.groups import group_of
from calipers.checkpoint.names import expert_names, stored_module_names
from calipers.checkpoint.source import source_folder
from calipers.checkpoint.state import own_modules
from calipers.checkpoint.ties import tied_names
from calipers.checkpoint.unknown_model import UnknownModel
from calipers.topology.names import EXPERTS_PATTERN
from calipers.topology.ties import says_tied

# What calibration may change, under each of the names that models have for it.
_PATCHED = (
    ("tie_word_embeddings",),
    ("torch_dtype", "dtype"),
    ("num_experts", "num_local_experts", "moe_num_experts"),
)
_INESSENTIAL = {
    *(key for keys in _PATCHED for key in keys),
    *("_name_or_path", "architectures", "auto_map", "transformers_version"),
    QUANTIZATION_CONFIG_NAME,
}
# Typed: the function is not.
_experts_scheme: Callable[[QuantizationConfig], QuantizationScheme] = get_experts_scheme


def checkpoint_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return what goes into config.json."""
    config = model_config(model)
    quantization = quantization_config(model)
    if quantization is not None:
        config[QUANTIZATION_CONFIG_NAME] = quantization
    return config


def model_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the model's config: the original file, where it still tells what the model is."""
    folder = source_folder(model)
    if folder is None:
        return _serialized(model)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop(QUANTIZATION_CONFIG_NAME, None)
    if isinstance(model, UnknownModel):
        return config  # nobody knows what it says
    if _changed_since(folder, model):
        return _serialized(model)
    text, now = (each.get("text_config", each) for each in (config, model.config.to_dict()))
    now |= {"dtype": _dtype(model), "tie_word_embeddings": _ties(model)}
    for keys in _PATCHED:
        value = next((now[key] for key in keys if now.get(key) is not None), None)
        if value is not None:
            text[next((key for key in keys if key in text), keys[-1])] = value
    return config


def _changed_since(folder: Path, model: PreTrainedModel) -> bool:
    """Whether anybody changed the config after it was read: layers cut off, a vocabulary grown."""
    read = type(model.config).from_pretrained(folder)
    return bool(_essence(read.to_dict()) != _essence(model.config.to_dict()))


def _essence(value: Any) -> Any:
    """Return a config without what is brought up to date anyhow, or says nothing of the model."""
    if not isinstance(value, dict):
        return value
    return {key: _essence(each) for key, each in value.items() if key not in _INESSENTIAL}


def _serialized(model: PreTrainedModel) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    config.pop(QUANTIZATION_CONFIG_NAME, None)
    config |= {"architectures": [type(model).__name__], "dtype": _dtype(model)}
    if not _ties(model):
        config.get("text_config", config)["tie_word_embeddings"] = False
    return config


def _dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _ties(model: PreTrainedModel) -> bool:
    """Whether the embeddings are tied, whatever the config says: quantizing one unties them."""
    return says_tied(model) and bool(tied_names(model))


class _NamesInMemory:
    """A model of which only the modules are seen, so that their names are not translated."""

    def __init__(self, model: nn.Module) -> None:
        self.named_modules = model.named_modules


def quantization_config(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return how the checkpoint is quantized; None if it is not. No scheme is changed."""
    found = QuantizationConfig.from_pretrained(_NamesInMemory(model))
    if found is None:
        return None
    config: QuantizationConfig = found.model_copy(deep=True)
    _set_formats(model, config)
    _set_targets(model, config)
    config.quantization_status = QuantizationStatus.COMPRESSED
    # Readers that build the model as transformers does ask by the names in memory, others by
    # those on disk.
    stored = stored_module_names(model, config.ignore or [])
    config.ignore = list(dict.fromkeys(name for pair in stored.items() for name in pair[::-1]))
    transform = getattr(model, TRANSFORM_CONFIG_NAME, None)
    return {
        COMPRESSION_VERSION_NAME: compressed_tensors.__version__,
        QUANTIZATION_METHOD_NAME: QUANTIZATION_METHOD,
        SPARSITY_CONFIG_NAME: {},
        TRANSFORM_CONFIG_NAME: {} if transform is None else transform.model_dump(mode="json"),
        **config.model_dump(mode="json", exclude={"quant_method"}),
    }


def _set_formats(model: nn.Module, config: QuantizationConfig) -> None:
    formats = set()
    pending = dict(config.config_groups)
    for _, module in own_modules(model):
        scheme = scheme_of(module)
        if scheme is None:
            continue
        formats.add(module_format(module, scheme))
        for name in [name for name, group in pending.items() if group == scheme]:
            pending.pop(name).format = module_format(module, scheme)
    formats.discard(CompressionFormat.dense)
    several = len(formats) > 1
    only = next(iter(formats), CompressionFormat.dense)
    config.format = CompressionFormat.mixed_precision.value if several else only.value


def _set_targets(model: PreTrainedModel, config: QuantizationConfig) -> None:
    """See to it that readers of the config find the group of each module."""
    wanted = dict(_groups_of_modules(model, config))
    if dict(_groups_by_targets(model, config)) != wanted:
        _name_modules(model, config, wanted)
    _point_at_experts(config, {wanted[name] for name in expert_names(model) if name in wanted})


def _name_modules(
    model: PreTrainedModel, config: QuantizationConfig, wanted: dict[str, str]
) -> None:
    """Name the modules of each group one by one, in memory and on disk."""
    stored = stored_module_names(model, wanted)
    for key, group in config.config_groups.items():
        names = [name for name, its_key in wanted.items() if its_key == key]
        if names:
            group.targets = list(dict.fromkeys(n for name in names for n in (name, stored[name])))


def _point_at_experts(config: QuantizationConfig, keys: set[str]) -> None:
    """Let transformers, which has no modules for experts, know their group by a pattern."""
    groups = [config.config_groups[key] for key in keys]
    if len(groups) == 1 and _experts_scheme(config) is not groups[0]:
        groups[0].targets = [*groups[0].targets, EXPERTS_PATTERN]


def _groups_of_modules(
    model: PreTrainedModel, config: QuantizationConfig
) -> Iterator[tuple[str, str]]:
    plain = {
        name: group.model_copy(update={"format": None})
        for name, group in config.config_groups.items()
    }
    for name, module in own_modules(model):
        scheme = scheme_of(module)
        if scheme is not None and isinstance(module, (nn.Linear, nn.Embedding)):
            scheme = scheme.model_copy(update={"format": None})
            yield name, next(key for key, group in plain.items() if group == scheme)


def _groups_by_targets(model: nn.Module, config: QuantizationConfig) -> Iterator[tuple[str, str]]:
    """Give each module with the group that a reader of the config takes for it."""
    for name, module in own_modules(model):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            key = group_of(module, [name], config)
            if key is not None:
                yield name, key
