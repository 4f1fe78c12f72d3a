"""Models of architectures that transformers does not know, as far as their files tell of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from calipers.checkpoint.headers import first_float_dtype, stored_tensors
from calipers.checkpoint.location import check_location
from calipers.checkpoint.reader import load_skeleton
from calipers.errors import RecipeError, damaged_file, shortened
from calipers.files.reading import read_json_object
from calipers.files.safetensors_header import StoredTensor


class UnknownModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Modules as the names of tensors say; every matrix called ``weight`` is that of a Linear.

    Nothing can run through it. Which of its matrices are those of embeddings cannot be told, so
    modules are meant by their names alone.
    """

    config_class = PreTrainedConfig

    def __init__(self, config: PreTrainedConfig, stored: Mapping[str, StoredTensor]) -> None:
        super().__init__(config)
        for name, tensor in stored.items():
            path, _, local = name.rpartition(".")
            parent, _, own = path.rpartition(".")
            if local == "weight" and len(tensor.shape) == 2 and own:
                rows, columns = tensor.shape
                with torch.device("meta"):
                    linear = nn.Linear(columns, rows, f"{path}.bias" in stored, dtype=tensor.dtype)
                _child(self, parent).add_module(own, linear)
                continue
            module = _child(self, path)
            if not (isinstance(module, nn.Linear) and local == "bias"):
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                is_float = tensor.dtype.is_floating_point
                module.register_parameter(local, nn.Parameter(empty, is_float))

    def check_patterns(self, patterns: Iterable[str]) -> None:
        """Refuse patterns that mean modules by their classes."""
        names = {name for name, _ in self.named_modules()}
        classes = [
            pattern
            for pattern in patterns
            if not pattern.startswith("re:") and pattern not in names
        ]
        if classes:
            linear = [
                name for name, module in self.named_modules() if isinstance(module, nn.Linear)
            ]
            raise RecipeError(
                f"transformers does not know models of type '{self.config.model_type}', so it "
                f"cannot be told which modules are '{classes[0]}'",
                hint="Mean modules by their names, such as 're:.*_proj'. Matrices are "
                f"{shortened(linear)}",
            )


def _child(module: nn.Module, path: str) -> nn.Module:
    """Return a submodule, which is made if there is none."""
    for part in filter(None, path.split(".")):
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    return module


def unknown_model(folder: Path) -> UnknownModel | None:
    """Build the model of a folder from the names of its tensors; None where transformers can."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    content = read_json_object(file)
    kind = content.get("model_type")
    if content.get("auto_map") or not isinstance(kind, str):
        return None
    if kind in CONFIG_MAPPING and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    stored = stored_tensors(folder)
    if not stored:
        raise damaged_file(file, "there are no safetensors beside it")
    config = PreTrainedConfig.from_dict(content)
    vars(config).update(model_type=kind, _name_or_path=str(folder))
    config.dtype = config.dtype or first_float_dtype(stored)
    # A Linear must be there before its bias comes.
    names = sorted(stored, key=lambda name: not name.endswith(".weight"))
    return UnknownModel(config, {name: stored[name] for name in names})


def skeleton_of(name: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Build a model without values, as transformers has it; else as the names in its files say."""
    check_location(str(name), gguf=True)
    unknown = unknown_model(Path(name)) if Path(name).is_dir() else None
    return unknown or load_skeleton(name, trust_remote_code=trust_remote_code)
