"""How many bytes the tensors of a checkpoint take: one that is there, or one that will be."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from transformers import PreTrainedModel

from calipers.checkpoint.compression import checkpoint_tensors, compressed_state, tensor_names
from calipers.checkpoint.headers import stored_tensors


def size_on_disk(folder: Path) -> int:
    """Return the bytes of all tensors in the files of a folder, without what names them."""
    return sum(tensor.size for tensor in stored_tensors(folder).values())


def size_when_stored(model: PreTrainedModel) -> int:
    """Return the bytes of all tensors that would be written; the model may have no values."""
    return sum(tensor.nbytes for _, tensor in checkpoint_tensors(model, tensor_names(model)))


def sizes_of_module(module: nn.Module) -> dict[str, int]:
    """Return the bytes of each tensor of a module itself, as it would be written."""
    return {name: tensor.nbytes for name, tensor in compressed_state(module).items()}
