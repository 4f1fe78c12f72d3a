from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from data import DISTRIBUTIONS, FORMATS
from engines import with_engines
from geometries import in_any_memory, pieces

from calipers.kernels.rounding import Quantization, quantization_errors
from calipers.numerics.qparams import qparams_of


def both(
    values: torch.Tensor, args: QuantizationArgs, norm: float = 2.0, shrink: float = 0.8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the error that the kernel finds, and what compressed-tensors makes of the values."""
    low, high = (v.float() * shrink for v in (values.amin((0, -2, -1)), values.amax((0, -2, -1))))
    scale, zero_point = qparams_of(low, high, args)
    error = quantization_errors(Quantization(values, scale, zero_point, args, norm))
    zero = None if args.symmetric else zero_point[..., None, None]
    expected = torch.stack(
        [fake_quantize(one.float(), scale[..., None, None], zero, args) for one in values]
    )
    return error, expected


@with_engines("distribution, fmt", list(DISTRIBUTIONS), list(FORMATS))
def test_equals_compressed_tensors(distribution: str, fmt: str) -> None:
    values = DISTRIBUTIONS[distribution]((2, 3, 4, 1, 37))
    args = QuantizationArgs(**FORMATS[fmt])
    error, expected = both(values, args)
    exact = (expected.double() - values).square().sum((0, -2, -1))
    torch.testing.assert_close(error, exact, rtol=1e-6, atol=1e-30)


@in_any_memory
def test_any_memory(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    args = QuantizationArgs(num_bits=4, symmetric=False)
    error, expected = both(pieces(memory, shape, values), args)
    exact = (expected.double() - values).square().sum((0, -2, -1))
    torch.testing.assert_close(error, exact, rtol=1e-5, atol=1e-12)


@with_engines("norm, size", [0.5, 1.0, 2.0, 2.4, 3.0, 5.5, 7.5, 12.0], [1e-18, 1.0, 1e15])
def test_norms(norm: float, size: float) -> None:
    values = torch.randn(1, 3, 2, 1, 500) * size
    error, expected = both(values, QuantizationArgs(num_bits=4), norm)
    exact = (expected.double() - values).abs().pow(norm).sum((0, -2, -1))
    torch.testing.assert_close(error, exact, rtol=2e-5, atol=0)


def test_scales_need_not_be_contiguous() -> None:
    values, args = torch.randn(1, 4, 2, 1, 8), QuantizationArgs(num_bits=4, symmetric=False)
    scale, zero_point = torch.rand(4, 2, 2).unbind(-1)
    found = quantization_errors(Quantization(values, scale, zero_point.round(), args))
    plain = quantization_errors(
        Quantization(values, scale.clone(), zero_point.round().clone(), args)
    )
    assert torch.equal(found, plain)


def test_strange_values_add_no_error() -> None:
    values = torch.tensor([[[[1.0, float("nan"), float("inf"), -float("inf"), 0.3]]]])
    error = quantization_errors(
        Quantization(values, torch.tensor([0.5]), None, QuantizationArgs(num_bits=4))
    )
    assert error.item() == pytest.approx(0.04)


@in_any_memory
@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_weighted_errors(
    norm: float, shape: tuple[int, ...], memory: str, dtype: torch.dtype
) -> None:
    values, weights = torch.randn(shape).to(dtype), torch.rand(shape[-1])  # of each column
    args = QuantizationArgs(num_bits=4, symmetric=False)
    plain, expected = both(values, args, norm)
    low, high = (v.float() * 0.8 for v in (values.amin((0, -2, -1)), values.amax((0, -2, -1))))
    parts = (*qparams_of(low, high, args), args, norm)
    torch.testing.assert_close(
        quantization_errors(Quantization(values, *parts)), plain, rtol=1e-12, atol=0
    )
    found = quantization_errors(Quantization(pieces(memory, shape, values), *parts, weights))
    exact = (expected.double() - values).abs().pow(norm).mul(weights).sum((0, -2, -1))
    torch.testing.assert_close(found, exact, rtol=2e-6, atol=1e-12)
