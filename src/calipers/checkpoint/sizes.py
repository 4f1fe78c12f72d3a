"""How many bytes the tensors of a checkpoint take: one that is there, or one that will be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from calipers.checkpoint.compression import checkpoint_tensors, compressed_state, tensor_names
from calipers.checkpoint.headers import stored_tensors
from calipers.files.safetensors_header import StoredTensor


def size_on_disk(folder: Path) -> int:
    """Return the bytes of all tensors in the files of a folder, without what names them."""
    return sum(tensor.size for tensor in stored_tensors(folder).values())


def size_when_stored(model: PreTrainedModel) -> int:
    """Return the bytes of all tensors that would be written; the model may have no values."""
    return sum(tensor.nbytes for _, tensor in checkpoint_tensors(model, tensor_names(model)))


def sizes_of_module(module: nn.Module) -> dict[str, int]:
    """Return the bytes of each tensor of a module itself, as it would be written."""
    return {name: tensor.nbytes for name, tensor in compressed_state(module).items()}


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight in the files of a checkpoint.

    :param weights: how many numbers it has
    :param size: the bytes of all that is stored for it: codes, scales, zero points
    """

    weights: int
    size: int


def quantized_weights(folder: Path) -> dict[str, QuantizedWeight]:
    """Return the quantized weights in the files of a folder, in their order, by module."""
    stored = sorted(stored_tensors(folder).items(), key=lambda pair: (pair[1].file, pair[1].begin))
    parts: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored:
        module, _, kind = name.rpartition(".")
        if kind.startswith("weight"):
            parts.setdefault(module, {})[kind] = tensor
    return {
        module: QuantizedWeight(_numbers(found), sum(tensor.size for tensor in found.values()))
        for module, found in parts.items()
        if "weight_packed" in found or {"weight", "weight_scale"} <= found.keys()
    }


def bits_per_weight(folder: Path) -> float | None:
    """Return the bits that a quantized weight takes, scales included; None if there is none."""
    found = quantized_weights(folder).values()
    numbers = sum(weight.weights for weight in found)
    return 8 * sum(weight.size for weight in found) / numbers if numbers else None


def _numbers(found: Mapping[str, StoredTensor]) -> int:
    if "weight_shape" in found:
        return math.prod(found["weight_shape"].read().tolist())
    if "weight_packed" in found:  # without a shape: two codes of four bits to a byte
        packed = found["weight_packed"]
        return math.prod(packed.shape) * packed.dtype.itemsize * 2
    return math.prod(found["weight"].shape)
