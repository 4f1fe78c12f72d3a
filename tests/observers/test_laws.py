from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DISTRIBUTIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import LAWS, PROMISES, Law

from calipers.observers import Observer

NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 4,
    "scale_dtype": torch.float8_e4m3fn,
}
KINDS = {
    "weight": [
        QuantizationArgs(num_bits=4, group_size=4),
        QuantizationArgs(num_bits=8, strategy="channel", symmetric=False),
        QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[2, 4]),
        QuantizationArgs(num_bits=8, type="float", symmetric=False),
        QuantizationArgs(**NVFP4),
    ],
    "input": [
        QuantizationArgs(num_bits=8),
        QuantizationArgs(num_bits=8, symmetric=False),
        QuantizationArgs(num_bits=8, type="float", group_size=4),
        QuantizationArgs(**NVFP4),
    ],
    "k": [
        QuantizationArgs(num_bits=8, type="float", strategy="attn_head"),
        QuantizationArgs(num_bits=4, symmetric=False),
    ],
}


@st.composite
def streams(draw: st.DrawFn, name: str) -> tuple[str, QuantizationArgs, list[torch.Tensor]]:
    base_name = draw(st.sampled_from(PROMISES[name].base_names or sorted(KINDS)))
    args = draw(st.sampled_from([args for args in KINDS[base_name] if PROMISES[name].suits(args)]))
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    width, rows, heads = (draw(st.integers(1, 3)) for _ in range(3))

    def tensor() -> torch.Tensor:
        size = draw(st.integers(1, 4))
        shape: tuple[int, ...] = (rows, 4 * width)
        if base_name == "input":
            shape = (size, draw(st.integers(1, 3)), 4 * width)
        if base_name == "k":
            shape = (size, heads, draw(st.integers(1, 3)), 4 * width)
        make = DISTRIBUTIONS[draw(st.sampled_from(sorted(DISTRIBUTIONS)))]
        return make(shape).to(dtype)

    return base_name, args, [tensor() for _ in range(draw(st.integers(1, 4)))]


def test_every_observer_has_made_its_promises() -> None:
    built_in = {
        name
        for name in Observer.registered_names()
        if Observer.get_value_from_registry(name).__module__.startswith("calipers.")
    }
    assert set(PROMISES) == built_in


@pytest.mark.filterwarnings("ignore:.*Falls back to plain error")
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", sorted(PROMISES))
@settings(max_examples=8)
@given(st.data())
def test_law(name: str, law: Law, data: st.DataObject) -> None:
    law(name, *data.draw(streams(name)))
