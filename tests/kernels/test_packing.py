"""Codes are packed bit by bit as the compressors of compressed-tensors pack them.

With them come the values they stand for, and the errors of each column.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from data import DTYPES, EIGHTEEN, draw
from engines import NATIVE_ENGINES, threads_in_use, with_engines
from geometries import MEMORIES
from torch import Tensor

from calipers.kernels import rounding
from calipers.kernels.rounding import pack_weight

FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"int{bits}": ("pack-quantized", {"num_bits": bits}) for bits in range(2, 9)},
    "int3 in bytes": ("int-quantized", {"num_bits": 3}),
    "int8 in bytes": ("int-quantized", {"num_bits": 8}),
    "fp8": ("float-quantized", {"num_bits": 8, "type": "float"}),
    "naive fp8": ("naive-quantized", {"num_bits": 8, "type": "float"}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float"}),
}
CUTS: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": {"strategy": "group", "group_size": 6},
    "tensor_group": {"strategy": "tensor_group", "group_size": 16},
    "block": {"strategy": "block", "block_structure": [3, 10]},
}
SHAPES = [(1, 2), (1, 48), (7, 96), (5, 4098), (2, 8192), (3, 96 * 90), (30, 48)]
ZERO_POINTS = ["none", "zeros", "any"]


@pytest.fixture(autouse=True)
def nothing_is_left_to_torch(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine != "torch":
        monkeypatch.setattr(rounding, "_pack_in_torch", None)


def by_the_library(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    args: QuantizationArgs,
    form: CompressionFormat,
) -> Tensor:
    given = {"": weight, "_scale": scale, "_zero_point": zero_point, "_global_scale": global_scale}
    state = {f"weight{name}": part for name, part in given.items() if part is not None}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    # Of the result, asymmetric arguments change nothing but the zero points beside it.
    compressed = BaseCompressor.get_value_from_registry(form.value).compress(state, scheme)
    packed: Tensor = compressed.get("weight_packed", compressed.get("weight"))
    return packed.contiguous()


def assert_packed(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    args: QuantizationArgs,
    form: CompressionFormat,
) -> None:
    given = weight, scale, zero_point, global_scale, args
    packed = pack_weight(*given, form, with_values=True)
    expected, codes = by_the_library(*given, form), packed.codes
    assert codes is not None
    assert (codes.dtype, codes.shape) == (expected.dtype, expected.shape)
    assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8))
    values, errors = values_and_errors(*given, form)
    torch.testing.assert_close(packed.values, values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(packed.errors, errors, rtol=1e-9, atol=0, equal_nan=True)
    alone = pack_weight(*given, form)
    assert torch.equal(alone.codes.view(torch.uint8), codes.view(torch.uint8))
    torch.testing.assert_close(alone.errors, packed.errors, rtol=0, atol=0, equal_nan=True)
    assert alone.values is None


def values_and_errors(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    args: QuantizationArgs,
    form: CompressionFormat | None,
) -> tuple[Tensor, Tensor]:
    """What the codes of the library stand for, in float32, and how far that is from the weight."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    if global_scale is not None and (form is None or form in rounding.IN_PAIRS):
        scale = scale / global_scale
    codes = quantize(weight, scale, zero_point, args).to(wide)
    values = dequantize(codes, scale.to(wide), zero_point, args, dtype=wide)
    # They cannot overflow: float64 is for sums alone.
    error = torch.where(weight.isfinite(), values - weight.to(wide), 0.0).double().square()
    return values, error.reshape(-1, weight.shape[-1]).sum(0)


def shape_of_scales(shape: tuple[int, int], args: QuantizationArgs) -> tuple[int, ...]:
    rows, columns = shape
    if args.strategy == "tensor":
        return (1,)
    height, width = args.block_structure or (1, args.group_size or columns)
    return -(-rows // height), -(-columns // width)


def scales_for(weight: Tensor, shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> Tensor:
    """Scales of either sign, with which most codes occur, and some values are clipped."""
    ends = torch.finfo(dtype)
    size = weight.float().abs().max() / 2 ** (bits - 1) * (0.3 + torch.rand(shape))
    return size.clamp(ends.tiny / 16, ends.max).copysign(torch.randn(shape) + 1).to(dtype)


def zero_points_for(kind: str, shape: tuple[int, ...], args: QuantizationArgs) -> Tensor | None:
    if kind == "none":
        return None
    whole = torch.randint(-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1), shape)
    values = whole * (kind == "any")
    return values.to(torch.float8_e4m3fn if args.type == "float" else torch.int8)


@with_engines(
    "fmt, cut, shape, values, dtype, scale_dtype, zero_points",
    list(FORMATS),
    list(CUTS),
    SHAPES,
    EIGHTEEN,
    DTYPES,
    DTYPES,
    ZERO_POINTS,
)
def test_equals_compressed_tensors(
    fmt: str,
    cut: str,
    shape: tuple[int, int],
    values: str,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    zero_points: str,
) -> None:
    form, of_format = FORMATS[fmt]
    if "group" in cut and shape[1] % CUTS[cut]["group_size"]:
        shape = (shape[0], 48)
    args = QuantizationArgs(**of_format, **CUTS[cut])
    weight = draw(values, shape, dtype)
    scale = scales_for(weight, shape_of_scales(shape, args), args.num_bits, scale_dtype)
    zero_point = zero_points_for(zero_points, scale.shape, args)
    global_scale = torch.tensor([0.37]) if cut == "tensor_group" else None
    assert_packed(weight, scale, zero_point, global_scale, args, CompressionFormat(form))


@with_engines(
    "fmt, dtype, zero_point, scale", list(FORMATS), DTYPES, [None, 0.0, -0.0, 1.0], [1.0, -3.0]
)
def test_every_value(fmt: str, dtype: torch.dtype, zero_point: float | None, scale: float) -> None:
    """Of a 16-bit dtype; of float32 those and their neighbours, on both sides of every tie."""
    form, of_format = FORMATS[fmt]
    args = QuantizationArgs(**of_format, strategy="channel")
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    weight = bits.view(torch.bfloat16 if dtype is torch.float32 else dtype)
    weight = weight[~weight.isnan()].to(dtype)
    if dtype is torch.float32:
        ways = torch.tensor([[-torch.inf], [torch.inf]])
        weight = torch.cat([weight, *torch.nextafter(weight, ways)])
    zero = None if zero_point is None else torch.tensor([[zero_point]], dtype=torch.float8_e4m3fn)
    shaped = torch.tensor([[scale]], dtype=dtype)
    assert_packed(weight[None], shaped, zero, None, args, CompressionFormat(form))


@pytest.mark.parametrize(
    "memory", ["contiguous", "misaligned", "with_gaps", "in_rows", "transposed"]
)
@pytest.mark.parametrize("fmt", ["int3", "fp8", "nvfp4"])
def test_any_memory(memory: str, fmt: str) -> None:
    form, of_format = FORMATS[fmt]
    args = QuantizationArgs(**of_format, strategy="group", group_size=6)
    weight = MEMORIES[memory](torch.randn(9 * 42).bfloat16(), (9, 42))
    scale, zero_point = torch.rand(9, 2, 7).add(0.1).bfloat16().unbind(1)
    assert_packed(weight, scale, zero_point.round(), None, args, CompressionFormat(form))


@with_engines("fmt, dtype", list(FORMATS), DTYPES, engines=NATIVE_ENGINES)
def test_threads(fmt: str, dtype: torch.dtype) -> None:
    form, of_format = FORMATS[fmt]
    args = QuantizationArgs(**of_format, strategy="group", group_size=128)
    weight, scale = torch.randn(1500, 1024).to(dtype), torch.rand(1500, 8).add(0.1).to(dtype)
    results = []
    for threads in (1, 2, 7):
        with threads_in_use(threads):
            packed = pack_weight(weight, scale, None, None, args, CompressionFormat(form))
            results.append((packed.codes.view(torch.uint8), packed.errors))
    assert all(torch.equal(a, b) for x in results for a, b in zip(results[0], x, strict=True))


@with_engines("fmt, cut, dtype", list(FORMATS), list(CUTS), DTYPES)
def test_without_codes(fmt: str, cut: str, dtype: torch.dtype) -> None:
    """Only what is lost; also where codes have no place, as one fp4 without another."""
    args = QuantizationArgs(**FORMATS[fmt][1], **CUTS[cut])
    weight = torch.randn(7, 48 if "group" in cut else 45).to(dtype)
    scale = scales_for(weight, shape_of_scales(tuple(weight.shape), args), args.num_bits, dtype)
    given = weight, scale, zero_points_for("any", scale.shape, args), torch.tensor([0.37]), args
    packed = pack_weight(*given, None, with_values=True)
    values, errors = values_and_errors(*given, None)
    assert packed.codes is None
    assert torch.equal(packed.values, values)
    torch.testing.assert_close(packed.errors, errors, rtol=1e-9, atol=0)


@pytest.mark.parametrize("cause", ["weight", "scale", "zero_point"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_is_left_to_the_library(
    cause: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no code; what casts make of it depends on the machine."""
    monkeypatch.undo()
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    weight, scale = torch.randn(3, 40).to(dtype), torch.ones(3, 1, dtype=dtype)
    zero_point = torch.zeros(3, 1).to(torch.float8_e4m3fn)
    weight[2, 39] = float("nan") if cause == "weight" else 0.0
    scale[2] = 0.0 if cause == "scale" else 1.0
    zero_point[2] = float("nan") if cause == "zero_point" else 0.0
    form = CompressionFormat.float_quantized
    assert_packed(weight, scale, zero_point, None, args, form)
    assert pack_weight(weight, scale, zero_point, None, args, form).codes[2, 39].isnan()


UNKNOWN: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
    "scale without a dimension": (
        torch.randn(5, 32).bfloat16(),
        torch.tensor(0.0123),
        {"num_bits": 8, "strategy": "tensor"},
    ),
    "float64": (torch.randn(5, 32), torch.rand(5, 1).double(), {"strategy": "channel"}),
    "one bit": (torch.randn(5, 32), torch.rand(5, 1), {"num_bits": 1, "strategy": "channel"}),
    "a stack": (torch.randn(2, 5, 32), torch.rand(2, 5, 1), {"strategy": "channel"}),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_the_kernel_does_not_know(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    weight, scale, options = UNKNOWN[case]
    args = QuantizationArgs(**options)
    assert_packed(weight, scale, None, None, args, CompressionFormat.pack_quantized)


@pytest.mark.parametrize("engine", ["torch"], indirect=True)
@pytest.mark.parametrize(
    ("fmt", "cut"), [("int5", "channel"), ("fp8", "block"), ("fp8", "tensor"), ("nvfp4", "group")]
)
def test_torch_packs_some_rows_at_a_time(
    fmt: str, cut: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "_PART", 400)
    form, of_format = FORMATS[fmt]
    args = QuantizationArgs(**of_format, **CUTS[cut])
    weight = torch.randn(31, 48)
    scale = scales_for(weight, shape_of_scales((31, 48), args), args.num_bits, torch.float32)
    zero_point = zero_points_for("any", scale.shape, args)
    assert_packed(weight, scale, zero_point, None, args, CompressionFormat(form))
