"""Tensors that are one with another one: only that is stored."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from compressed_tensors.quantization.utils import is_module_quantized
from transformers import PreTrainedModel

from calipers.checkpoint.state import offloaded_tensors, owner_of, read_tensor
from calipers.topology.ties import declared_ties, says_tied


def tied_names(model: PreTrainedModel) -> dict[str, str]:
    """Return each tensor that is a tied copy, with the one that is stored in its place."""
    tensors = offloaded_tensors(model)
    return {
        copy: source
        for copy, source in declared_ties(model, tensors)
        if source in tensors and _is_tied(model, tensors, copy, source)
    }


def unquantized_ties(model: PreTrainedModel, ties: Mapping[str, str]) -> dict[str, str]:
    """Return those of a model's ties that are left: quantized tensors are no longer tied."""
    return {copy: source for copy, source in ties.items() if not _is_quantized(model, copy, source)}


def _is_tied(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], copy: str, source: str
) -> bool:
    if _is_quantized(model, copy, source):
        return False
    one, other = tensors[copy], tensors[source]
    if one is other:
        return True
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    if one.device.type != "meta" and one.data_ptr() == other.data_ptr():
        return True
    # Offloading makes two tensors of one. They are still tied if the model says so.
    return says_tied(model) and torch.equal(read_tensor(model, copy), read_tensor(model, source))


def _is_quantized(model: PreTrainedModel, *names: str) -> bool:
    return any(is_module_quantized(owner_of(model, name)) for name in names)
