from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from data import DTYPES, FORMATS
from hypothesis import given
from hypothesis import strategies as st

from calipers.errors import TensorValueError
from calipers.numerics.formats import Format
from calipers.numerics.qparams import global_scale_of, qparams_of, quantize_dequantize

FINITE = st.floats(-1000, 1000, width=16)
ASYMMETRIC = [name for name in FORMATS if name.endswith("asym")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=8))
def test_equal_to_compressed_tensors(
    name: str, dtype: torch.dtype, ranges: list[tuple[float, float]]
) -> None:
    args = QuantizationArgs(**FORMATS[name])
    low = torch.tensor([min(pair) for pair in ranges], dtype=dtype)
    high = torch.tensor([max(pair) for pair in ranges], dtype=dtype)
    scale, zero_point = qparams_of(low, high, args)
    theirs, their_zero = calculate_qparams(low, high, args)
    assert torch.equal(scale, theirs)
    sound = ~torch.isnan(their_zero.float()) & (low < high)
    assert scale.dtype == dtype
    assert zero_point.dtype == their_zero.dtype
    assert torch.equal(zero_point.float()[sound], their_zero.float()[sound])
    assert torch.isfinite(zero_point.float()).all()


STORED = {
    "int4": (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn),
    "int8_asym": (torch.bfloat16, torch.float32),
    "fp8": (torch.bfloat16, torch.float8_e4m3fn),
    "fp4": (torch.float8_e4m3fn,),
}


@pytest.mark.parametrize("global_scale", [None, 3.7, 1e4])
@pytest.mark.parametrize("name", STORED)
def test_scales_are_rounded_as_compressed_tensors_does(
    name: str, global_scale: float | None
) -> None:
    factor = None if global_scale is None else torch.tensor([global_scale])
    high = torch.randn(300).abs() * torch.logspace(-6, 3, 300)
    low = -high * torch.rand(300)
    high[::50] = low[::50] = 0
    for stored in STORED[name]:
        args = QuantizationArgs(**FORMATS[name], scale_dtype=stored)
        theirs, their_zero = calculate_qparams(low, high, args, factor)
        scale, zero_point = qparams_of(low, high, args, factor)
        assert torch.equal(scale, theirs)
        sound = high > 0
        assert torch.equal(zero_point.float()[sound], their_zero.float()[sound])


@pytest.mark.parametrize("name", ["int4", "int4_asym", "fp8_asym"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_range_without_dimensions(name: str, dtype: torch.dtype) -> None:
    args = QuantizationArgs(**FORMATS[name])
    for size in torch.rand(20).to(dtype):
        ours, theirs = (
            function(-size / 3, size, args) for function in (qparams_of, calculate_qparams)
        )
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(ours, theirs, strict=True))
        assert ours[0].shape == ours[1].shape == (1,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ASYMMETRIC)
def test_an_empty_range_keeps_zero(name: str, dtype: torch.dtype) -> None:
    args = QuantizationArgs(**FORMATS[name])
    zeros = torch.zeros(3, dtype=dtype)
    scale, zero_point = qparams_of(zeros, zeros, args)
    assert torch.isfinite(scale).all()
    assert zero_point.float().tolist() == [0, 0, 0]
    assert fake_quantize(zeros, scale, zero_point, args).tolist() == [0, 0, 0]


def test_the_library_alone_would_give_nan() -> None:
    """If this fails, the guard for empty ranges may go."""
    args = QuantizationArgs(**FORMATS["fp8_asym"])
    zeros = torch.zeros(1)
    assert torch.isnan(calculate_qparams(zeros, zeros, args)[1].float()).all()


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 60000.0), (torch.float32, 3e38), (torch.bfloat16, 3e38)]
)
def test_a_range_wider_than_its_dtype(dtype: torch.dtype, bound: float) -> None:
    args = QuantizationArgs(num_bits=8, symmetric=False)
    low, high = torch.tensor([-bound], dtype=dtype), torch.tensor([bound], dtype=dtype)
    scale, zero_point = qparams_of(low, high, args)
    assert scale.dtype == dtype
    torch.testing.assert_close(scale.double(), (high.double() * 2 / 255), rtol=1e-2, atol=0)
    assert zero_point.tolist() in ([0], [-1])


def test_a_wide_range_does_not_spoil_a_small_one() -> None:
    args = QuantizationArgs(num_bits=8, symmetric=False)
    low = torch.tensor([-60000.0, 0.0], dtype=torch.float16)
    high = torch.tensor([60000.0, 1e-6], dtype=torch.float16)
    scale, zero_point = qparams_of(low, high, args)
    alone = qparams_of(low[1:], high[1:], args)
    assert torch.equal(scale[1:], alone[0])
    assert torch.equal(zero_point[1:], alone[1])
    assert scale[0].item() == pytest.approx(120000 / 255, rel=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
def test_powers_of_two_in_float16(bits: int) -> None:
    """What float32 finds, as long as float16 can hold it; the library answers inf or 1."""
    args = QuantizationArgs(num_bits=bits, type="float", group_size=32, scale_dtype=torch.uint8)
    absmax = torch.tensor([65504.0, 60000.0, 3.0, 1e-3, 6e-5, 1e-6, 6e-8, 0.0]).half()
    scale, zero_point = qparams_of(-absmax, absmax, args)
    exact, _ = calculate_qparams(-absmax.float(), absmax.float(), args)
    assert scale.dtype == torch.float16
    assert scale[:-1].tolist() == exact[:-1].clamp(min=2.0**-24).tolist()
    assert scale[-1] == 1
    assert not zero_point.float().any()
    huge = torch.tensor([3.3e38])
    assert qparams_of(-huge, huge, args)[0].item() == 2.0 ** (128 - {4: 2, 8: 8}[bits])
    ordinary = absmax[2:4]
    assert torch.equal(scale[2:4], calculate_qparams(-ordinary, ordinary, args)[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_range_that_is_not_finite(bad: float) -> None:
    with pytest.raises(TensorValueError, match="1 of 2 ranges have no finite, positive scale"):
        qparams_of(torch.tensor([0.0, -1.0]), torch.tensor([1.0, bad]), QuantizationArgs())


def test_a_scale_that_is_not_positive() -> None:
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    one = torch.ones(1)
    with pytest.raises(TensorValueError, match="1 of 1 ranges have no finite, positive scale"):
        qparams_of(-one, one, args, global_scale=-one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("absmax", [0.0, 1e-6, 0.03, 1.0, 448.0, 60000.0])
def test_global_scale(dtype: torch.dtype, absmax: float) -> None:
    value = torch.tensor(absmax, dtype=dtype)
    scale = global_scale_of(value)
    assert scale.dtype == torch.float32
    exact = 448 * 6 / value.double().item() if absmax else 1.0
    if dtype != torch.float16:
        assert torch.equal(scale, generate_gparam(-value.reshape(1), value.reshape(1)))
    assert scale.item() == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize("absmax", [5e-324, 1e-300, 1e-40, 1e40])
def test_global_scales_of_float64_are_finite(absmax: float) -> None:
    scale = global_scale_of(torch.tensor(absmax, dtype=torch.float64))
    assert 0 < scale.item() < torch.inf


def test_values_without_a_global_scale_are_refused() -> None:
    with pytest.raises(TensorValueError, match=r"up to 1e\+308 have no positive float32 global"):
        global_scale_of(torch.tensor(1e308, dtype=torch.float64))


@pytest.mark.parametrize("name", FORMATS)
@given(
    st.lists(FINITE, min_size=1, max_size=40),
    st.floats(2**-10, 50, width=32),
    st.integers(-7, 7),
)
def test_fake_quantization_is_bit_equal(
    name: str, values: list[float], scale: float, zero: int
) -> None:
    args = QuantizationArgs(**FORMATS[name])
    token = args.model_copy(update={"strategy": QuantizationStrategy.TOKEN})
    x, s = torch.tensor(values), torch.tensor([scale])
    zero_point = torch.tensor([0.0 if args.symmetric else float(zero)])
    ours = quantize_dequantize(x, s, None if args.symmetric else zero_point, Format.of(args))
    assert torch.equal(ours, fake_quantize(x, s, zero_point, token))
