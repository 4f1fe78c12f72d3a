"""The tensors of a checkpoint: packed, under their names on disk, one module at a time.

The model they are made of is not changed.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import compress_mx_scale
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.utils import is_module_quantized
from torch import nn
from transformers import PreTrainedModel

from calipers.checkpoint.state import (
    StoredNames,
    converted_back,
    join,
    module_state,
    offloaded_tensors,
    own_modules,
    owner_of,
    stored_names,
    tied_names,
)
from calipers.errors import CheckpointError, listing
from calipers.kernels.resources import FreedMemory
from calipers.kernels.rounding import IN_BYTES, IN_PAIRS, IN_WORDS, PACKED, pack_weight
from calipers.numerics.formats import FP8_DTYPE
from calipers.numerics.layout import strategy_name
from calipers.planning.specs import module_format

_BY_ROW = ("group", "channel")
_SIDES = {"input": "input_activations", "weight": "weights", "output": "output_activations"}
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


@torch.no_grad()
def compressed_state(
    module: nn.Module, codes: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return the tensors of a module itself as they are stored, under their local names.

    :param codes: its packed weight, which is then not quantized again
    """
    state = {name: tensor.detach() for name, tensor in module_state(module).items()}
    scheme = scheme_of(module)
    if scheme is None or module.quantization_status == QuantizationStatus.COMPRESSED:
        return state
    form = module_format(module, scheme)
    if form in PACKED and scheme.weights is not None and not state["weight"].is_meta:
        return _packed(state, scheme, form, codes)
    compressor = BaseCompressor.get_value_from_registry(form.value)
    compressed: dict[str, torch.Tensor] = compressor.compress(state, scheme)
    zero_point = compressed.get("weight_zero_point")
    if form in IN_WORDS and zero_point is not None and zero_point.dim() == 2:
        args = scheme.weights
        if strategy_name(args) in _BY_ROW:
            # Without values; the library leaves them unpacked, so here they get their shape.
            rows, columns = state["weight_zero_point"].shape
            column = pack_to_int32(torch.zeros(rows, 1, dtype=torch.int8), args.num_bits, 0)
            compressed["weight_zero_point"] = column.to("meta").expand(-1, columns)
    return compressed


def _packed(
    state: dict[str, torch.Tensor],
    scheme: QuantizationScheme,
    form: CompressionFormat,
    codes: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Return what the compressor of the library returns, in the same order."""
    args, packed = scheme.weights, state.copy()
    weight, scale = packed.pop("weight"), packed["weight_scale"]
    zero_point = packed.get("weight_zero_point")
    if codes is None:
        global_scale = packed.get("weight_global_scale")
        codes = pack_weight(weight, scale, zero_point, global_scale, args, form).codes
        assert codes is not None
    if form in IN_PAIRS:
        del packed["weight_scale"]  # it comes behind the codes
    packed["weight" if form in IN_BYTES else "weight_packed"] = codes
    if form in IN_WORDS:
        packed["weight_shape"] = torch.tensor(weight.shape)
        if zero_point is not None and not args.symmetric and strategy_name(args) in _BY_ROW:
            words = pack_to_int32(zero_point, args.num_bits, packed_dim=0)
            packed["weight_zero_point"] = words.contiguous()
    if form is CompressionFormat.nvfp4_pack_quantized:
        scale = scale.to(args.scale_dtype or FP8_DTYPE)
    elif form in (CompressionFormat.mxfp4_pack_quantized, CompressionFormat.mxfp8_quantized):
        scale = compress_mx_scale(scale, args.scale_dtype or torch.uint8)
    packed["weight_scale"] = scale
    for side, kind in _SIDES.items():
        of_side = getattr(scheme, kind)
        if of_side is not None and of_side.symmetric:
            packed.pop(f"{side}_zero_point", None)
    return packed


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


def name_on_disk(names: StoredNames, prefix: str, module: nn.Module, local: str) -> str | None:
    """Return the name of a tensor of a module on disk; None where it has none of its own."""
    weight = names.renamed.get(join(prefix, "weight")) if has_quantized_weight(module) else None
    if weight is not None:
        return weight.removesuffix("weight") + local
    return names.renamed.get(join(prefix, local))


def checkpoint_tensors(
    model: PreTrainedModel, names: StoredNames
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Give each tensor of the checkpoint with its name; the model is not changed."""
    waiting: dict[str, torch.Tensor] = {}
    freed = FreedMemory(most=1 << 20)  # of what is stored, which took several times as much to make
    for prefix, module in own_modules(model):
        size = 0
        for local, tensor in compressed_state(module).items():
            name, stored = join(prefix, local), name_on_disk(names, prefix, module, local)
            size += tensor.nbytes
            if stored is not None:
                yield stored, tensor
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
            scheme = scheme_of(owner_of(model, name))
            bits = 8 * tensor.element_size()
            if scheme is not None and scheme.weights is not None and name.endswith(".weight"):
                bits = scheme.weights.num_bits
            total += tensor.numel() * bits // 8
    return total


def shapes_of_quantized(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of quantized weights by the names on disk of their modules."""
    names = tensor_names(model).renamed
    return {
        names[join(prefix, "weight")].removesuffix(".weight"): module.get_parameter("weight").shape
        for prefix, module in own_modules(model)
        if has_quantized_weight(module)
    }


def size_when_stored(model: PreTrainedModel) -> int:
    """Return the bytes of all tensors that would be written; the model may have no values."""
    return sum(tensor.nbytes for _, tensor in checkpoint_tensors(model, tensor_names(model)))


def sizes_of_module(module: nn.Module) -> dict[str, int]:
    """Return the bytes of each tensor of a module itself, as it would be written."""
    return {name: tensor.nbytes for name, tensor in compressed_state(module).items()}
