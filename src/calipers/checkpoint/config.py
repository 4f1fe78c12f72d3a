"""config.json: the model's own, how its checkpoint is quantized, and who can load that."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import compressed_tensors
import torch
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
from compressed_tensors.utils.match import is_match, match_targets
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.compressed_tensors import get_experts_scheme

from calipers.checkpoint.auxiliary_files import source_folder
from calipers.checkpoint.compression import scheme_of
from calipers.checkpoint.state import expert_names, own_modules, stored_module_names, tied_names
from calipers.checkpoint.unknown_model import UnknownModel
from calipers.numerics.layout import strategy_name
from calipers.planning.specs import module_format
from calipers.topology.experts import unfused_experts
from calipers.topology.model import says_tied
from calipers.topology.names import EXPERTS_PATTERN

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
_DECODED_AS_BFLOAT16 = {
    CompressionFormat.nvfp4_pack_quantized,
    CompressionFormat.mxfp4_pack_quantized,
    CompressionFormat.mxfp8_quantized,
}
_ONE_SCALE = ("tensor", "channel")


def checkpoint_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return what goes into config.json."""
    return _model_config(model) | _quantization_config(model)


def _model_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the model's config: the original file, where it still tells what the model is."""
    folder = source_folder(model)
    config: dict[str, Any] = {}
    if folder is not None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config.pop(QUANTIZATION_CONFIG_NAME, None)
        if isinstance(model, UnknownModel):
            return config  # nobody knows what it says
        read = type(model.config).from_pretrained(folder)
    # Quantizing an embedding unties it, whatever the config says.
    tied = says_tied(model) and bool(tied_names(model))
    dtype = str(model.dtype).removeprefix("torch.")
    if folder is None or _essence(read.to_dict()) != _essence(model.config.to_dict()):
        # There is no file, or the config was changed after it was read: layers cut off, a
        # vocabulary grown.
        config = json.loads(model.config.to_json_string(use_diff=True))
        config.pop(QUANTIZATION_CONFIG_NAME, None)
        config |= {"architectures": [type(model).__name__], "dtype": dtype}
        if not tied:
            config.get("text_config", config)["tie_word_embeddings"] = False
        return config
    text, now = (each.get("text_config", each) for each in (config, model.config.to_dict()))
    now |= {"dtype": dtype, "tie_word_embeddings": tied}
    for keys in _PATCHED:
        value = next((now[key] for key in keys if now.get(key) is not None), None)
        if value is not None:
            text[next((key for key in keys if key in text), keys[-1])] = value
    return config


def _essence(value: Any) -> Any:
    """Return a config without what is brought up to date anyhow, or says nothing of the model."""
    if not isinstance(value, dict):
        return value
    return {key: _essence(inner) for key, inner in value.items() if key not in _INESSENTIAL}


def _quantization_config(model: PreTrainedModel) -> dict[str, Any]:
    """Return the entry that says how the checkpoint is quantized, if it is."""
    # Only the modules are shown, so that their names are not translated.
    shown = SimpleNamespace(named_modules=model.named_modules)
    original = QuantizationConfig.from_pretrained(shown)
    if original is None:
        return {}
    config: QuantizationConfig = original.model_copy(deep=True)
    formats = set()
    pending = dict(config.config_groups)
    for _, module in own_modules(model):
        if (scheme := scheme_of(module)) is not None:
            formats.add(module_format(module, scheme))
            for name in [name for name, group in pending.items() if group == scheme]:
                pending.pop(name).format = module_format(module, scheme)
    formats.discard(CompressionFormat.dense)
    several = len(formats) > 1
    only = next(iter(formats), CompressionFormat.dense)
    config.format = CompressionFormat.mixed_precision.value if several else only.value
    _set_targets(model, config)
    config.quantization_status = QuantizationStatus.COMPRESSED
    # Readers that build the model as transformers does ask by the names in memory, others by
    # those on disk.
    stored = stored_module_names(model, config.ignore or [])
    config.ignore = list(dict.fromkeys(name for pair in stored.items() for name in pair[::-1]))
    transform = getattr(model, TRANSFORM_CONFIG_NAME, None)
    quantization = {
        COMPRESSION_VERSION_NAME: compressed_tensors.__version__,
        QUANTIZATION_METHOD_NAME: QUANTIZATION_METHOD,
        SPARSITY_CONFIG_NAME: {},
        TRANSFORM_CONFIG_NAME: {} if transform is None else transform.model_dump(mode="json"),
        **config.model_dump(mode="json", exclude={"quant_method"}),
    }
    return {QUANTIZATION_CONFIG_NAME: quantization}


def _set_targets(model: PreTrainedModel, config: QuantizationConfig) -> None:
    """See to it that readers of the config find the group of each module."""
    plain = {
        key: group.model_copy(update={"format": None})
        for key, group in config.config_groups.items()
    }
    wanted: dict[str, str] = {}
    by_targets: dict[str, str] = {}  # what a reader of the config takes for each module
    for name, module in own_modules(model):
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            continue
        if (scheme := scheme_of(module)) is not None:
            scheme = scheme.model_copy(update={"format": None})
            wanted[name] = next(key for key, group in plain.items() if group == scheme)
        if (key := group_of(module, [name], config)) is not None:
            by_targets[name] = key
    if by_targets != wanted:
        stored = stored_module_names(model, wanted)
        for key, group in config.config_groups.items():
            names = [name for name, its_key in wanted.items() if its_key == key]
            if names:  # one by one, in memory and on disk
                both = (n for name in names for n in (name, stored[name]))
                group.targets = list(dict.fromkeys(both))
    # transformers, which has no modules for experts, knows their group by a pattern.
    keys = {wanted[name] for name in expert_names(model) if name in wanted}
    groups = [config.config_groups[key] for key in keys]
    if len(groups) == 1 and _experts_scheme(config) is not groups[0]:
        groups[0].targets = [*groups[0].targets, EXPERTS_PATTERN]


def group_of(module: nn.Module, names: Iterable[str], config: QuantizationConfig) -> str | None:
    """Return the key of the group that compressed-tensors takes for a module, if any.

    Where several groups match, a target that is the name of the module wins over a pattern, and a
    pattern over a class; of several patterns the first in alphabetical order wins.

    :param names: the name on disk and the one in memory, where they differ; the first that matches
        counts

    >>> weights = {"num_bits": 4}
    >>> all_of_them = {"targets": ["Linear"], "weights": weights}
    >>> some = {"targets": ["re:.*up_proj"], "weights": {**weights, "num_bits": 8}}
    >>> config = QuantizationConfig.model_validate({"config_groups": {"a": all_of_them, "b": some}})
    >>> [group_of(nn.Linear(1, 1), [name], config) for name in ("mlp.up_proj", "mlp.down_proj")]
    ['b', 'a']
    """
    names = list(dict.fromkeys(names))
    if any(is_match(name, module, config.ignore or []) for name in names):
        return None
    owner = {target: key for key, group in config.config_groups.items() for target in group.targets}
    matched = (match_targets(name, module, owner) for name in names)
    return next((owner[targets[0]] for targets in matched if targets), None)


@dataclass(frozen=True)
class LoadingProblem:
    """Something that goes wrong when transformers loads a checkpoint.

    :param cause: a sentence without its full stop
    :param advice: another one
    :param loads_as: the dtype in which nothing goes wrong; None if there is none
    """

    cause: str
    advice: str
    loads_as: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{self.cause}. {self.advice}"


def loading_problems(model: PreTrainedModel) -> Iterator[LoadingProblem]:
    """Find what goes wrong when transformers loads the checkpoint of a model."""
    schemes = {n: (m, s) for n, m in own_modules(model) if (s := scheme_of(m)) is not None}
    formats = {name: module_format(*pair) for name, pair in schemes.items()}
    small = sorted({form.value for form in formats.values() if form in _DECODED_AS_BFLOAT16})
    if small and model.dtype != torch.bfloat16:
        yield LoadingProblem(
            f"transformers decodes {', '.join(small)} to bfloat16, and this model is {model.dtype}",
            "Load the checkpoint with from_pretrained(…, dtype=torch.bfloat16).",
            loads_as=torch.bfloat16,
        )
    for name, (module, _) in schemes.items():
        if isinstance(module, nn.Embedding) and formats[name].value.endswith("pack-quantized"):
            yield LoadingProblem(
                f"transformers cannot load an Embedding in the format {formats[name].value} (here "
                f"'{name}')",
                "The tensors are complete, for clients that read them.",
            )
    # transformers fuses experts while loading, and decodes few formats on the way. Those in a
    # ModuleList it keeps as they are.
    fused = [
        n for n in unfused_experts(model) if not isinstance(model.get_submodule(n), nn.ModuleList)
    ]
    experts = [name for name in schemes if name.startswith(tuple(f"{parent}." for parent in fused))]
    known = expert_names(model)
    problems: dict[str, str] = {}
    for name in experts:
        problem: str | None = "has no place for single experts of this model"
        if name in known:
            problem = _expert_problem(formats[name], schemes[name][1])
        if problem is not None:
            problems.setdefault(problem, name)
    for problem, name in problems.items():
        yield LoadingProblem(
            f"transformers {problem} (here '{name}')",
            "The tensors are complete, in the layout of the original checkpoint, for clients that "
            "read single experts.",
        )


def _expert_problem(form: CompressionFormat, scheme: QuantizationScheme) -> str | None:
    """Return what transformers does wrong with a quantized expert, if anything."""
    weights = scheme.weights
    if form is CompressionFormat.nvfp4_pack_quantized:
        return "loads NVFP4 experts without their global scale, and so computes nonsense"
    if form is CompressionFormat.pack_quantized and not weights.symmetric:
        return "cannot load experts with zero points"
    plain = form is CompressionFormat.float_quantized and strategy_name(weights) in _ONE_SCALE
    packed = (CompressionFormat.pack_quantized, CompressionFormat.mxfp4_pack_quantized)
    if not plain and form not in packed:
        return f"cannot load experts in the format {form.value} per {strategy_name(weights)}"
    if scheme.input_activations is not None:
        return "does not quantize what goes into experts, so that its results differ a little"
    return None
