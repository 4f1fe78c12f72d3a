"""Observers, what they observe, how it is cut, formats and dtypes in pairs, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from data import CUTS, DTYPES, FORMATS, SCALE_FORMATS, schemes
from pairwise import pairwise
from torch import Tensor

from calipers.observers import Observer

build = Observer.load_from_registry

SCHEMES = schemes()
MINMAX = ["memoryless_minmax", "static_minmax", "minmax"]
# name: grid, norm and expand as published, and the number of candidates that maxshrink makes
SEARCHES = {
    "memoryless_mse": (100, 2.4, 1.0, 20),
    "mse": (100, 2.4, 1.0, 20),
    "nvfp4_expanded_mse": (200, 2.4, 1.8, 111),
    "imatrix_mse": (20, 3.0, 1.0, 20),
}


def expected_qparams(low: Tensor, high: Tensor, args: QuantizationArgs) -> tuple[Tensor, ...]:
    global_scale = None
    if args.strategy == "tensor_group":
        absmax = torch.maximum(-low.min(), high.max()).reshape(1)
        global_scale = generate_gparam(-absmax, absmax)
    if low.dtype == torch.float16 and args.scale_dtype == torch.bfloat16:
        low, high = low.float(), high.float()  # the library cannot do this in float16
    return (*calculate_qparams(low, high, args, global_scale), global_scale)


def in_pairs(names: list[str]) -> pytest.MarkDecorator:
    """Let any two of name, cut, format and dtype meet, and scales of their own kind any name."""
    rows = [
        (name, f"{cut}-{fmt}", dtype)
        for name, cut, fmt, dtype in pairwise(names, list(CUTS), list(FORMATS), DTYPES)
    ]
    rows += pairwise(names, list(SCALE_FORMATS), DTYPES)
    return pytest.mark.parametrize(("name", "scheme", "dtype"), rows)


@in_pairs(MINMAX)
def test_minmax(name: str, scheme: str, dtype: torch.dtype) -> None:
    base_name, shape, args = SCHEMES[scheme]
    value = torch.randn(shape).to(dtype)
    qparams = build(name, base_name=base_name, args=args)(value).get_qparams()
    low, high = reference.extrema(value, base_name, args)
    scale, zero_point, global_scale = expected_qparams(low, high, args)
    torch.testing.assert_close(qparams["scale"], scale, rtol=0, atol=0)
    assert torch.equal(qparams["zero_point"].float(), zero_point.float())
    assert qparams["zero_point"].dtype == zero_point.dtype
    if global_scale is None:
        assert qparams["global_scale"] is None
    else:
        assert torch.equal(qparams["global_scale"], global_scale)


@in_pairs([name for name in SEARCHES if name != "nvfp4_expanded_mse"])
@pytest.mark.filterwarnings("ignore:.*Falls back to plain error")
def test_search(name: str, scheme: str, dtype: torch.dtype) -> None:
    check_search(name, scheme, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4", "weight-group-int4_asym", "k-attn_head-fp8"])
def test_expanded_search(scheme: str, dtype: torch.dtype) -> None:
    check_search("nvfp4_expanded_mse", scheme, dtype)


def check_search(name: str, scheme: str, dtype: torch.dtype) -> None:
    base_name, shape, args = SCHEMES[scheme]
    value = torch.randn(shape).to(dtype)
    grid, norm, expand, count = SEARCHES[name]
    factors = [1 - i / grid for i in range(count)]
    observer = build(name, base_name=base_name, args=args, patience=10_000)(value)

    low, high = reference.extrema(value, base_name, args)
    wide_low, wide_high = low.float() * expand, high.float() * expand
    errors = reference.candidate_errors(
        value, base_name, args, wide_low, wide_high, factors, norm, dtype=dtype
    )
    best, second = np.argmin(errors, axis=0), np.partition(errors, 1, axis=0)[1]
    chosen = chosen_factors(observer, wide_low, wide_high, factors)
    columns = np.arange(errors.shape[1])
    assert (errors[chosen, columns] <= errors.min(0) * (1 + 1e-5)).all()
    clear = second > errors.min(0) * (1 + 1e-5)
    assert (chosen[clear] == best[clear]).all()

    # What was chosen is what get_qparams hands out, and compressed-tensors can use it.
    scale, zero_point, global_scale = expected_qparams(*observer.get_range(), args)
    qparams = observer.get_qparams()
    torch.testing.assert_close(qparams["scale"], scale, rtol=0, atol=0)
    assert torch.equal(qparams["zero_point"].float(), zero_point.float())
    if args.strategy != "token":
        # Groups of activations: the library takes a lone dimension of the scale for rows.
        leading = (None,) if base_name in ("input", "output") and scale.numel() > 1 else ()
        scale, zero_point = qparams["scale"][leading], qparams["zero_point"][leading]
        rounded = fake_quantize(value, scale, zero_point, args, global_scale=global_scale)
        assert torch.isfinite(rounded).all()
        assert rounded.shape == value.shape


def chosen_factors(
    observer: Observer, low: Tensor, high: Tensor, factors: list[float]
) -> np.ndarray:
    found_low, found_high = (v.reshape(-1) for v in observer.get_range())
    candidates = torch.tensor(factors)[:, None]
    lows, highs = (
        (v.reshape(1, -1) * candidates).to(found_low.dtype) for v in (low.float(), high.float())
    )
    same = (lows == found_low) & (highs == found_high)
    assert same.any(0).all(), "a range that is none of the candidates"
    return same.int().argmax(0).numpy()
