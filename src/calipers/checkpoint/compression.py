"""A frozen module in the form in which it is stored, made without changing the module."""

from __future__ import annotations

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.utils import is_module_quantized
from torch import nn

from calipers.checkpoint.state import module_state, own_modules
from calipers.errors import NotFrozenError

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
            raise NotFrozenError(name, "missing" if status is None else f"'{status.value}'")


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
    compressor = BaseCompressor.get_value_from_registry(module_format(module, scheme).value)
    compressed: dict[str, torch.Tensor] = compressor.compress(state, scheme)
    return compressed
