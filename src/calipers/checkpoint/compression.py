"""The tensors of a checkpoint: packed, under their names on disk, one module at a time.

The model they are made of is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.utils import is_module_quantized
from torch import nn
from transformers import PreTrainedModel

from calipers.checkpoint.names import StoredNames, converted_back, stored_names
from calipers.checkpoint.state import join, module_state, offloaded_tensors, own_modules, owner_of
from calipers.checkpoint.ties import tied_names
from calipers.errors import CheckpointError, listing
from calipers.kernels.memory import Freed
from calipers.numerics.layout import strategy_name

_OF_ROWS = ("weight", "weight_scale", "weight_zero_point")
_PACKED = ("weight_packed", "weight_zero_point")
_PART = 1 << 19
_STORABLE = (QuantizationStatus.FROZEN, QuantizationStatus.COMPRESSED)


def scheme_of(module: nn.Module) -> QuantizationScheme | None:
    """Return how a module is quantized, or None where nothing of it is."""
    scheme: QuantizationScheme | None = (
        module.quantization_scheme if is_module_quantized(module) else None
    )
    return scheme


def has_quantized_weight(module: nn.Module) -> bool:
    """Whether the weight of a module is stored in another form than it has in memory."""
    scheme = scheme_of(module)
    return scheme is not None and scheme.weights is not None


def check_frozen(model: nn.Module) -> None:
    """Refuse a model with modules that are quantized but not frozen."""
    for name, module in own_modules(model):
        status = getattr(module, "quantization_status", None)
        if scheme_of(module) is not None and status not in _STORABLE:
            found = "missing" if status is None else f"'{status.value}'"
            raise CheckpointError(
                f"has a quantization scheme, but its status is {found}, not 'frozen'",
                subject=f"Module '{name}'",
                hint="Calibrate and freeze the model before writing it.",
            )


def module_format(module: nn.Module, scheme: QuantizationScheme) -> CompressionFormat:
    """Return the format in which a quantized module is stored; the scheme stays untouched."""
    # The library asks for the exact class. A subclass of Linear is stored as a Linear.
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding)
    kind = next((kind for kind in kinds if isinstance(module, kind)), type(module))
    return CompressionFormat(scheme.format or infer_module_format(kind, scheme))


@torch.no_grad()
def compressed_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a module itself as they are stored, under their local names."""
    state = {name: tensor.detach() for name, tensor in module_state(module).items()}
    scheme = scheme_of(module)
    if scheme is None or module.quantization_status == QuantizationStatus.COMPRESSED:
        return state
    form = module_format(module, scheme)
    compressor = BaseCompressor.get_value_from_registry(form.value)
    if form is CompressionFormat.pack_quantized and _has_scales_per_row(state, scheme):
        pack = _packed_shapes if state["weight"].is_meta else _packed_by_parts
        return pack(compressor, state, scheme)
    compressed: dict[str, torch.Tensor] = compressor.compress(state, scheme)
    return compressed


def _has_scales_per_row(state: dict[str, torch.Tensor], scheme: QuantizationScheme) -> bool:
    rows = len(state["weight"]) if state["weight"].dim() == 2 else -1
    by_row = strategy_name(scheme.weights) in ("group", "channel")
    return by_row and all(len(state[name]) == rows for name in _OF_ROWS if name in state)


def _packed_shapes(
    compressor: type[BaseCompressor], state: dict[str, torch.Tensor], scheme: QuantizationScheme
) -> dict[str, torch.Tensor]:
    """Pack tensors without values; the library leaves such zero points as they are."""
    packed: dict[str, torch.Tensor] = compressor.compress(state, scheme)
    if "weight_zero_point" in packed:
        rows, columns = state["weight_zero_point"].shape
        column = pack_to_int32(torch.zeros(rows, 1, dtype=torch.int8), scheme.weights.num_bits, 0)
        packed["weight_zero_point"] = column.to("meta").expand(-1, columns)
    return packed


def _packed_by_parts(
    compressor: type[BaseCompressor], state: dict[str, torch.Tensor], scheme: QuantizationScheme
) -> dict[str, torch.Tensor]:
    """Pack some rows at a time: packing takes many times the memory of what is packed.

    Zero points are packed along the rows. The bits of 32 of them fill whole words.
    """
    weight = state["weight"]
    step = max(32, _PART // weight.shape[1] // 32 * 32)
    parts = []
    for start in range(0, len(weight), step):
        rows = {name: state[name][start : start + step] for name in _OF_ROWS if name in state}
        parts.append(compressor.compress(state | rows, scheme))
    joined = {
        name: torch.cat([part[name] for part in parts]) if name in _PACKED else tensor
        for name, tensor in parts[0].items()
    }
    whole = {"weight_scale": state["weight_scale"], "weight_shape": torch.tensor(weight.shape)}
    return joined | whole


# All of them


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
