from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.lifecycle.forward import quantize
from data import DISTRIBUTIONS, DTYPES, FORMATS
from engines import with_engines
from geometries import in_any_memory, pieces

from calipers.kernels.rounding import quantization_errors, quantize_with_error
from calipers.numerics.qparams import qparams_of


def both(
    values: torch.Tensor, args: QuantizationArgs, norm: float = 2.0, shrink: float = 0.8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the kernel makes of the values, its error, and what compressed-tensors makes."""
    low, high = (v.float() * shrink for v in (values.amin((0, -2, -1)), values.amax((0, -2, -1))))
    scale, zero_point = qparams_of(low, high, args)
    result, error = quantize_with_error(values, scale, zero_point, args, norm)
    zero = None if args.symmetric else zero_point[..., None, None]
    expected = torch.stack(
        [fake_quantize(one.float(), scale[..., None, None], zero, args) for one in values]
    )
    return result, error, expected


@with_engines("distribution, fmt", list(DISTRIBUTIONS), list(FORMATS))
def test_equals_compressed_tensors(distribution: str, fmt: str) -> None:
    values = DISTRIBUTIONS[distribution]((2, 3, 4, 1, 37))
    args = QuantizationArgs(**FORMATS[fmt])
    result, error, expected = both(values, args)
    assert torch.equal(result, expected)
    exact = (expected.double() - values).square().sum((0, -2, -1))
    torch.testing.assert_close(error, exact, rtol=1e-6, atol=1e-30)


@with_engines("working, fmt", [torch.bfloat16, torch.float16, torch.float32], list(FORMATS))
def test_codes_are_those_of_a_checkpoint_in_that_dtype(working: torch.dtype, fmt: str) -> None:
    values = torch.randn(1, 3, 4, 1, 200).to(working)
    args = QuantizationArgs(**FORMATS[fmt])
    low, high = values.amin((0, -2, -1)) * 0.8, values.amax((0, -2, -1)) * 0.8
    scale, zero_point = qparams_of(low, high, args)
    scale = scale.to(working)
    zero = None if args.symmetric else zero_point[..., None, None]
    codes = quantize(values[0], scale[..., None, None], zero, args).float()
    moved = codes if zero is None else codes - zero.float()
    expected = (moved * scale.float()[..., None, None])[None]
    given = (values.float(), scale.float(), zero_point, args)
    result, error = quantize_with_error(*given, working=working)
    assert torch.equal(result, expected)
    exact = (expected.double() - values).square().sum((0, -2, -1))
    torch.testing.assert_close(error, exact, rtol=1e-6, atol=1e-30)
    torch.testing.assert_close(quantization_errors(*given, working=working), error)


@in_any_memory
def test_any_memory(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    args = QuantizationArgs(num_bits=4, symmetric=False)
    result, error, expected = both(pieces(memory, shape, values), args)
    assert result.dtype == dtype
    assert torch.equal(result, expected.to(dtype))
    exact = (expected.double() - values).square().sum((0, -2, -1))
    torch.testing.assert_close(error, exact, rtol=1e-5, atol=1e-12)


@with_engines("norm, size", [0.5, 1.0, 2.0, 2.4, 3.0, 5.5, 7.5, 12.0], [1e-18, 1.0, 1e15])
def test_norms(norm: float, size: float) -> None:
    values = torch.randn(1, 3, 2, 1, 500) * size
    _, error, expected = both(values, QuantizationArgs(num_bits=4), norm)
    exact = (expected.double() - values).abs().pow(norm).sum((0, -2, -1))
    torch.testing.assert_close(error, exact, rtol=2e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strange_values_stay(dtype: torch.dtype) -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), -float("nan")], dtype=dtype)
    args = QuantizationArgs(num_bits=4)
    result, _ = quantize_with_error(values.reshape(1, 1, 1, 4), torch.ones(1), None, args)
    assert result.isnan().flatten().tolist() == [True, False, False, True]
    assert result.flatten()[1:3].tolist() == [float("inf"), -float("inf")]


def test_scales_need_not_be_contiguous() -> None:
    values, args = torch.randn(1, 4, 2, 1, 8), QuantizationArgs(num_bits=4, symmetric=False)
    scale, zero_point = torch.rand(4, 2, 2).unbind(-1)
    found = quantize_with_error(values, scale, zero_point.round(), args)
    plain = quantize_with_error(values, scale.clone(), zero_point.round().clone(), args)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


def test_strange_values_stay_and_add_no_error() -> None:
    values = torch.tensor([[[[1.0, float("nan"), float("inf"), -float("inf"), 0.3]]]])
    args = QuantizationArgs(num_bits=4)
    result, error = quantize_with_error(values, torch.tensor([0.5]), None, args)
    assert torch.equal(
        result.nan_to_num(7.0), torch.tensor([[[[1.0, 7.0, 3.4028235e38, -3.4028235e38, 0.5]]]])
    )
    assert error.item() == pytest.approx(0.04)


@in_any_memory
@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_weighted_errors(
    norm: float, shape: tuple[int, ...], memory: str, dtype: torch.dtype
) -> None:
    values, weights = torch.randn(shape).to(dtype), torch.rand(shape[-1])  # of each column
    args = QuantizationArgs(num_bits=4, symmetric=False)
    _, plain, expected = both(values, args, norm)
    low, high = (v.float() * 0.8 for v in (values.amin((0, -2, -1)), values.amax((0, -2, -1))))
    parts = (*qparams_of(low, high, args), args, norm)
    torch.testing.assert_close(quantization_errors(values, *parts), plain, rtol=1e-12, atol=0)
    found = quantization_errors(pieces(memory, shape, values), *parts, weights)
    exact = (expected.double() - values).abs().pow(norm).mul(weights).sum((0, -2, -1))
    torch.testing.assert_close(found, exact, rtol=2e-6, atol=1e-12)
