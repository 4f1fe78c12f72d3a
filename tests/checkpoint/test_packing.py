"""Weights are packed some rows at a time; the result is that of packing them at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
    initialize_module_for_quantization,
)
from pairwise import pairwise

from calipers.checkpoint import compression
from calipers.observers import Observer

STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "channel"},
    {"strategy": "group", "group_size": 32},
    {"strategy": "tensor"},
]


@pytest.mark.parametrize(
    ("rows", "bits", "symmetric", "cut"),
    pairwise([1, 33, 96, 101], range(2, 9), [True, False], STRATEGIES),
)
def test_packing_by_parts(
    rows: int, bits: int, symmetric: bool, cut: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, **cut)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    linear = torch.nn.Linear(64, rows)
    torch.nn.init.normal_(linear.weight, 0.3)
    initialize_module_for_quantization(linear, scheme)
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    for name, value in observer(linear.weight.detach()).get_qparams().items():
        if value is not None and hasattr(linear, f"weight_{name}"):
            getattr(linear, f"weight_{name}").data.copy_(value)
    linear.quantization_status = QuantizationStatus.FROZEN
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    state = {name: tensor.detach() for name, tensor in linear.state_dict().items()}
    at_once = compressor.compress(state, scheme)
    monkeypatch.setattr(compression, "_PART", 64 * 32)
    by_parts = compression.compressed_state(linear)
    assert list(by_parts) == list(at_once)
    for name, tensor in at_once.items():
        assert by_parts[name].dtype == tensor.dtype
        assert torch.equal(by_parts[name], tensor), name
