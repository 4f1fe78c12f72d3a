from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from compressed_tensors.quantization import (
    FP4_E2M1_DATA,
    QuantizationArgs,
    round_to_quantized_type_args,
)
from compressed_tensors.quantization.utils import calculate_range
from data import FORMATS
from hypothesis import given
from hypothesis import strategies as st

from calipers.errors import ConfigurationError
from calipers.numerics.formats import Format, ScaleKind


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_the_grid_written_by_hand(name: str) -> None:
    args = QuantizationArgs(**FORMATS[name])
    assert Format.of(args).values().double().tolist() == reference.grid_of(args).tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_limits_are_those_of_compressed_tensors(name: str) -> None:
    args = QuantizationArgs(**FORMATS[name])
    low, high = calculate_range(args, torch.device("cpu"))
    assert Format.of(args).limits == (low.item(), high.item())


@pytest.mark.parametrize("name", FORMATS)
@given(st.lists(st.floats(-500, 500, width=32), min_size=1, max_size=50))
def test_rounding_is_that_of_compressed_tensors(name: str, numbers: list[float]) -> None:
    args = QuantizationArgs(**FORMATS[name])
    low, high = Format.of(args).limits
    x = torch.tensor(numbers).clamp(low, high)
    ours = Format.of(args).round_(x.clone())
    assert torch.equal(
        ours, round_to_quantized_type_args(x, args, torch.tensor(low), torch.tensor(high))
    )
    assert ours.double().tolist() == reference.round_to_grid(x.double().numpy(), args).tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_ties_go_to_the_even_code(name: str) -> None:
    args = QuantizationArgs(**FORMATS[name])
    grid = reference.grid_of(args)
    middles = (grid[1:] + grid[:-1]) / 2
    ours = Format.of(args).round_(torch.from_numpy(middles).float())
    assert ours.double().tolist() == reference.round_to_grid(middles, args).tolist()
    if name == "fp4":
        assert torch.equal(ours, FP4_E2M1_DATA.cast_to_fp4(torch.from_numpy(middles).float()))


def test_a_negative_scale_gives_other_values_where_the_lowest_code_has_no_counterpart() -> None:
    for name, kwargs in FORMATS.items():
        fmt = Format.of(QuantizationArgs(**kwargs))
        mirrored = torch.equal(fmt.values(), -fmt.values().flip(0))
        assert fmt.takes_signed_scales == (fmt.symmetric and not mirrored), name


@pytest.mark.parametrize(
    ("name", "expected"), [("int4_asym", "int4"), ("fp8", "float8"), ("fp4", "float4")]
)
def test_what_users_are_told(name: str, expected: str) -> None:
    assert Format.of(QuantizationArgs(**FORMATS[name])).name == expected


def test_the_grid_rounds_to_itself() -> None:
    for kwargs in FORMATS.values():
        fmt = Format.of(QuantizationArgs(**kwargs))
        assert torch.equal(fmt.round_(fmt.values()), fmt.values())
        assert np.all(np.diff(fmt.values().numpy()) > 0)


@pytest.mark.parametrize(
    ("kwargs", "kind"),
    [
        (
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 16,
                "scale_dtype": torch.float8_e4m3fn,
            },
            ScaleKind.E4M3_GLOBAL,
        ),
        (
            {"num_bits": 4, "type": "float", "group_size": 32, "scale_dtype": torch.uint8},
            ScaleKind.POWER_OF_TWO,
        ),
        (
            {"num_bits": 8, "type": "float", "group_size": 32, "scale_dtype": torch.uint8},
            ScaleKind.POWER_OF_TWO,
        ),
        ({"num_bits": 4, "group_size": 32}, ScaleKind.FLOAT),
        ({"num_bits": 4, "group_size": 32, "scale_dtype": torch.bfloat16}, ScaleKind.FLOAT),
    ],
)
def test_scale_kinds(kwargs: dict[str, object], kind: ScaleKind) -> None:
    assert Format.of(QuantizationArgs(**kwargs)).scale is kind


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_bits": 1}, "int with 1 bits is not a supported format"),
        ({"num_bits": 16}, "int with 16 bits is not a supported format"),
        ({"num_bits": 6, "type": "float", "zp_dtype": torch.int8}, "float with 6 bits is not"),
        ({"num_bits": 4, "type": "float", "symmetric": False}, "Asymmetric fp4 is not"),
        (
            {"num_bits": 4, "type": "float", "group_size": 64, "scale_dtype": torch.uint8},
            r"group_size 64 and uint8 scales \(MX scales: symmetric float, strategy group, group_s",
        ),
        (
            {
                "num_bits": 8,
                "type": "float",
                "symmetric": False,
                "group_size": 32,
                "scale_dtype": torch.uint8,
            },
            "MX scales: symmetric float",
        ),
        (
            {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": 32,
                "scale_dtype": torch.uint8,
            },
            "MX scales: symmetric float, strategy group",
        ),
        ({"num_bits": 4, "group_size": 32, "scale_dtype": torch.uint8}, "int with 4 bits, group_s"),
    ],
)
def test_formats_that_do_not_exist(kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Format.of(QuantizationArgs(**kwargs))
