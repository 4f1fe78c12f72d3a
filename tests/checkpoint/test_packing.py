"""What is stored of a module is what the compressor of compressed-tensors makes of it."""

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
from engines import ENGINES, engine_in_use
from pairwise import pairwise

from calipers.checkpoint.compression import compressed_state
from calipers.observers import Observer
from calipers.planning.specs import module_format

GROUPS = {"strategy": "group", "group_size": 32}
CUTS: list[dict[str, Any]] = [
    {"strategy": "channel"},
    GROUPS,
    {"strategy": "tensor"},
    {"strategy": "block", "block_structure": [8, 16]},
]
FP4 = {"num_bits": 4, "type": "float"}
NVFP4 = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn}
MX = {**GROUPS, "scale_dtype": torch.uint8}
SCHEMES: dict[str, dict[str, Any]] = {
    "float-quantized": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "nvfp4-pack-quantized": {**FP4, **NVFP4},
    "mxfp4-pack-quantized": {**FP4, **MX},
    "mxfp8-quantized": {"num_bits": 8, "type": "float", **MX},
}


def assert_stored(rows: int, args: QuantizationArgs, inputs: QuantizationArgs | None) -> str:
    """Compare all tensors of a frozen module; return the format."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
    linear = torch.nn.Linear(64, rows).bfloat16()
    torch.nn.init.normal_(linear.weight, 0.3)
    initialize_module_for_quantization(linear, scheme)
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    for name, value in observer(linear.weight.detach()).get_qparams().items():
        if value is not None and hasattr(linear, f"weight_{name}"):
            getattr(linear, f"weight_{name}").data.copy_(value)
    linear.quantization_status = QuantizationStatus.FROZEN
    form = module_format(linear, scheme).value
    state = {name: tensor.detach() for name, tensor in linear.state_dict().items()}
    expected = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    stored = compressed_state(linear)
    assert list(stored) == list(expected)
    for name, tensor in expected.items():
        assert (stored[name].dtype, stored[name].shape) == (tensor.dtype, tensor.shape), name
        assert (
            stored[name]
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(tensor.contiguous().view(-1).view(torch.uint8))
        ), name
    return form


@pytest.mark.parametrize(
    ("rows", "bits", "symmetric", "cut", "engine"),
    pairwise([1, 33, 96, 101], range(2, 9), [True, False], CUTS, [ENGINES[0], ENGINES[-1]]),
)
def test_whole_numbers(
    rows: int, bits: int, symmetric: bool, cut: dict[str, Any], engine: str
) -> None:
    args = QuantizationArgs(num_bits=bits, symmetric=symmetric, **cut)
    with engine_in_use(engine):
        assert assert_stored(rows, args, None) == "pack-quantized"


@pytest.mark.parametrize("symmetric", [True, False])
def test_whole_numbers_with_those_of_inputs(symmetric: bool) -> None:
    args = QuantizationArgs(num_bits=8, symmetric=symmetric, strategy="channel")
    inputs = QuantizationArgs(num_bits=8, symmetric=symmetric, strategy="tensor")
    assert assert_stored(33, args, inputs) == "int-quantized"


@pytest.mark.parametrize("form", SCHEMES)
def test_floats(form: str) -> None:
    args = QuantizationArgs(**SCHEMES[form])
    inputs = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    assert assert_stored(33, args, inputs) == form
