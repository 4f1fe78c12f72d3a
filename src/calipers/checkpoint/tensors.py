"""The tensors of a checkpoint under their names on disk, one module at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from calipers.checkpoint.compression import compressed_state, has_quantized_weight, scheme_of
from calipers.checkpoint.names import StoredNames, converted_back, stored_names
from calipers.checkpoint.state import join, offloaded_tensors, own_modules, owner_of
from calipers.checkpoint.ties import tied_names
from calipers.errors import CheckpointError, listing
from calipers.kernels.memory import Freed


def tensor_names(model: PreTrainedModel) -> StoredNames:
    """Return where each tensor in memory goes; those that are not stored are missing."""
    omitted = {*tied_names(model), *(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    kept = [name for name in offloaded_tensors(model) if name not in omitted]
    names = stored_names(model, kept)
    for name, group in names.converted.items():
        if has_quantized_weight(owner_of(model, name)) and name.endswith(".weight"):
            raise CheckpointError(
                "is quantized, but checkpoints of this model hold it in another shape, into which "
                f"transformers converts {listing(group)}. Quantized tensors cannot be converted",
                subject=f"'{name}'",
                hint="Add the module to 'ignore'.",
            )
    return names


def checkpoint_tensors(
    model: PreTrainedModel, names: StoredNames
) -> Iterator[tuple[str, torch.Tensor]]:
    """Give each tensor of the checkpoint with its name; the model is not changed."""
    waiting: dict[str, torch.Tensor] = {}
    freed = Freed(most=1 << 20)  # of what is stored, which took several times as much to make
    for prefix, module in own_modules(model):
        size = 0
        weight = names.renamed.get(join(prefix, "weight")) if has_quantized_weight(module) else None
        for local, tensor in compressed_state(module).items():
            name = join(prefix, local)
            size += tensor.nbytes
            if weight is not None:
                yield weight.removesuffix("weight") + local, tensor
            elif name in names.renamed:
                yield names.renamed[name], tensor
            elif name in names.converted:
                waiting[name] = tensor
                group = names.converted[name]
                if all(other in waiting for other in group):
                    together = {other: waiting.pop(other) for other in group}
                    yield from converted_back(model, together).items()
        freed.count(size)


def estimated_size(model: PreTrainedModel, names: StoredNames) -> int:
    """Return how many bytes the tensors of the checkpoint take, without making them."""
    total = 0
    for name, tensor in offloaded_tensors(model).items():
        if name in names.renamed or name in names.converted:
            total += tensor.numel() * _stored_bits(model, name, tensor) // 8
    return total


def _stored_bits(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> int:
    scheme = scheme_of(owner_of(model, name))
    if scheme is None or scheme.weights is None or not name.endswith(".weight"):
        return 8 * tensor.element_size()
    bits: int = scheme.weights.num_bits
    return bits
