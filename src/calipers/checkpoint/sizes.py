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
from calipers.errors import damaged_file
from calipers.files.safetensors_header import StoredTensor

_LARGEST_SHAPE = 1024
"""More bytes than the shape of any weight takes."""


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
        module: QuantizedWeight(_numbers(module, found), sum(each.size for each in found.values()))
        for module, found in parts.items()
        if "weight_packed" in found or {"weight", "weight_scale"} <= found.keys()
    }


def bits_per_weight(folder: Path) -> float | None:
    """Return the bits that a quantized weight takes, scales included; None if there is none."""
    found = quantized_weights(folder).values()
    numbers = sum(weight.weights for weight in found)
    return 8 * sum(weight.size for weight in found) / numbers if numbers else None


def noted_shape(stored: StoredTensor) -> tuple[int, ...] | None:
    """Return the shape of a weight that a tensor ``weight_shape`` holds; None if it holds none."""
    if stored.dtype.is_floating_point or stored.size > _LARGEST_SHAPE:
        return None
    found = tuple(int(size) for size in stored.read().flatten().tolist())
    return found if len(found) >= 2 and min(found) > 0 else None


def _numbers(module: str, found: Mapping[str, StoredTensor]) -> int:
    noted = found.get("weight_shape")
    if noted is not None:
        shape = noted_shape(noted)
        if shape is None:
            problem = f"'{module}.weight_shape' does not hold the shape of a weight"
            raise damaged_file(noted.file, problem)
        return math.prod(shape)
    if "weight_packed" in found:  # without a shape: two codes of four bits to a byte
        packed = found["weight_packed"]
        return math.prod(packed.shape) * packed.dtype.itemsize * 2
    return math.prod(found["weight"].shape)
