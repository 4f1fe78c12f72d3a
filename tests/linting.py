"""Quantized checkpoints of every format, and defects that are put into their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from families import build, saved, token_ids
from safetensors.torch import load_file, save_file

import calipers

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
Change = Callable[[torch.Tensor], torch.Tensor] | torch.Tensor | None


def quantized_by(**settings: Any) -> dict[str, Any]:
    return {"modifiers": [{"QuantizationModifier": {"ignore": ["lm_head"], **settings}}]}


INT4_IN_BYTES = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
    "format": "int-quantized",
}
RECIPES: dict[str, Any] = {
    **{name: name for name in ("W4A16", "W4A16_ASYM", "W3A16", "W8A16", "W8A8", "FP8")},
    **{name: name for name in ("FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP8")},
    "kv": quantized_by(scheme="W8A16", kv_cache_scheme={"num_bits": 8, "type": "float"}),
    "mixed": quantized_by(scheme={"W4A16": ["re:.*q_proj"], "FP8": ["re:.*o_proj"]}),
    # 100 columns: the last word of a row has room left, and 36 rows those of zero points.
    "narrow": quantized_by(
        config_groups={
            "all": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "strategy": "channel", "symmetric": False},
            }
        }
    ),
    "signed": quantized_by(
        scheme="W4A16",
        weight_observer={"name": "optimal", "importance": "none", "signed_scale": True},
    ),
    "int4 in bytes": quantized_by(config_groups={"all": INT4_IN_BYTES}),
}
SIZES: dict[str, dict[str, int]] = {
    "narrow": {"hidden_size": 100, "intermediate_size": 36, "num_attention_heads": 2}
}


def sources(place: Path, name: str) -> Path:
    """The model that a checkpoint is made from."""
    folder = place / ("source-narrow" if name in SIZES else "source")
    if not folder.exists():
        saved(build("llama", torch.bfloat16, **SIZES.get(name, {})), folder)
    return folder


def checkpoint(place: Path, name: str) -> Path:
    """A checkpoint that is as it should be; made once."""
    folder = place / name.replace(" ", "-")
    if not folder.exists():
        calipers.oneshot(
            sources(place, name), RECIPES[name], token_ids(), output_dir=folder, progress=False
        )
    return folder


def with_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config["quantization_config"])
    file.write_text(json.dumps(config))


def of_groups(**changes: Any) -> Any:
    """Change how the weights of all groups are said to be quantized."""

    def change(config: dict[str, Any]) -> None:
        for group in config["config_groups"].values():
            group["weights"].update(changes)

    return change


def damaged(
    sound: Path,
    place: Path,
    tensors: Mapping[str, Change] | None = None,
    config: Callable[[dict[str, Any]], Any] | None = None,
) -> Path:
    """A copy with other tensors and another config; None takes a tensor away."""
    folder = place / "damaged"
    shutil.copytree(sound, folder)
    file = folder / "model.safetensors"
    found = load_file(file)
    for name, change in (tensors or {}).items():
        if change is None:
            del found[name]
        else:
            found[name] = change(found[name].clone()) if callable(change) else change
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, file)
    if config is not None:
        with_config(folder, config)
    return folder


def with_value(value: float, index: Any = 0) -> Callable[[torch.Tensor], torch.Tensor]:
    """Put one value into a tensor, also into one of fp8."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.view(-1)
        flat[index] = torch.tensor(value).to(tensor.dtype)
        return tensor

    return change
