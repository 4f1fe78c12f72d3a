"""The best scale for all data at once, against brute force over the raw values in float64."""

from __future__ import annotations

import math
from typing import Any

import brute
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import EIGHTEEN, FORMATS, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import assert_same
from pairwise import pairwise
from torch import Tensor

from calipers.observers import Observer

TRIED = ("int8", "int4", "int4_asym", "int8_asym", "fp8", "fp4")


def build(fmt: str, base_name: str = "input", strategy: str = "tensor", **options: Any) -> Observer:
    args = QuantizationArgs(**FORMATS[fmt], strategy=strategy)
    return Observer.load_from_registry("histogram_mse", base_name=base_name, args=args, **options)


def error(
    x: Tensor, qparams: Any, args: QuantizationArgs, norm: float = 2.0, piece: int = 0
) -> float:
    scale, zero = (qparams[name].flatten()[piece].double() for name in ("scale", "zero_point"))
    return float(brute.errors(x, scale.reshape(1), args, float(zero), norm))


def least(x: Tensor, dtype: torch.dtype, args: QuantizationArgs, norm: float = 2.0) -> float:
    scales = brute.around(brute.floats_of(dtype), x, octaves=11)
    return float(brute.all_errors(x, scales, args, norm).min()) if x.any() else 0.0


@pytest.mark.parametrize(
    ("fmt", "dtype", "norm"),
    pairwise(["int8", "int4", "fp8", "int4_asym"], [torch.bfloat16, torch.float16], [2.0, 2.4]),
)
def test_no_scale_is_better_for_all_data(fmt: str, dtype: torch.dtype, norm: float) -> None:
    for kind in EIGHTEEN[:: 4 if "asym" in fmt else 1]:
        batches = [draw(kind, (3, 8), dtype) * size for size in (1.0, 0.5, 0.25)]
        observer = build(fmt, norm=norm)
        for batch in batches:
            observer(batch)
        qparams = observer.get_qparams()
        x = torch.cat(batches)
        assert qparams["scale"].dtype == dtype
        found = error(x, qparams, observer.args, norm)
        assert found <= least(x, dtype, observer.args, norm) * (1 + 1e-6), kind


def test_all_zero_points_of_int8() -> None:
    for x in (torch.randn(4, 5) + 0.5, torch.rand(3, 4), torch.randn(6, 1) ** 3):
        observer = build("int8_asym")(x.bfloat16())
        found = error(x.bfloat16(), observer.get_qparams(), observer.args)
        assert found <= least(x.bfloat16(), torch.bfloat16, observer.args) * (1 + 1e-6)


@pytest.mark.parametrize("fmt", ["int8", "int4_asym", "fp8"])
def test_each_head_has_its_own_best(fmt: str) -> None:
    sizes = torch.tensor([0.01, 1.0, 30.0])[:, None, None]
    x = (torch.randn(2, 3, 5, 8) * sizes).bfloat16()
    observer = build(fmt, "k", "attn_head")(x)
    qparams = observer.get_qparams()
    assert qparams["scale"].shape == (3, 1, 1)
    for head in range(3):
        found = error(x[:, head], qparams, observer.args, piece=head)
        assert found <= least(x[:, head], torch.bfloat16, observer.args) * (1 + 1e-6)


@pytest.mark.parametrize("fmt", ["int8", "int4", "fp8", "fp4"])
def test_float32_scales(fmt: str) -> None:
    """Values are counted as bfloat16; for these no float32 scale is better."""
    x = torch.randn(40, 8) * 3
    observer = build(fmt)(x)
    qparams, rounded = observer.get_qparams(), x.bfloat16()
    assert qparams["scale"].dtype == torch.float32
    found = error(rounded, qparams, observer.args)
    scales = x.abs().max() * torch.rand(20_000, dtype=torch.float64) ** 3 * 2
    scales = torch.cat([scales, float(qparams["scale"]) * torch.linspace(0.99, 1.01, 999).double()])
    assert found <= float(brute.errors(rounded, scales, observer.args).min()) * (1 + 1e-9)


@pytest.mark.parametrize(("fmt", "norm"), [("int4_asym", 2.0), ("int8", 2.4), ("int4_asym", 2.4)])
def test_float32_scales_that_cannot_be_swept(fmt: str, norm: float) -> None:
    """At least as good as every scale of 8 bits."""
    x = torch.randn(40, 8) + 0.3
    observer = build(fmt, norm=norm)(x)
    found = error(x.bfloat16(), observer.get_qparams(), observer.args, norm)
    assert found <= least(x.bfloat16(), torch.bfloat16, observer.args, norm) * (1 + 1e-6)


def test_it_is_not_an_average_of_batches() -> None:
    """An outlier that one batch has counts as often as it occurs."""
    batches = [torch.randn(64, 16).bfloat16() for _ in range(8)]
    batches[0][0, 0] = 12
    args = QuantizationArgs(num_bits=4)
    ours = build("int4")
    classic = Observer.load_from_registry("mse", base_name="input", args=args)
    extrema = Observer.load_from_registry("static_minmax", base_name="input", args=args)
    for batch in batches:
        ours(batch), classic(batch), extrema(batch)
    found = [error(torch.cat(batches), o.get_qparams(), args) for o in (ours, classic, extrema)]
    assert found[0] < min(found[1:])


@pytest.mark.parametrize("fmt", ["int8", "int4_asym", "fp8"])
def test_the_range_is_what_codes_cover(fmt: str) -> None:
    observer = build(fmt)(torch.randn(50, 8))
    low, high = observer.get_range()
    qparams = observer.get_qparams()
    ends = brute.grid_of(observer.args)[[0, -1]]
    expected = [(end - float(qparams["zero_point"])) * float(qparams["scale"]) for end in ends]
    assert [float(low), float(high)] == pytest.approx(expected, rel=1e-6)


@settings(max_examples=20)
@given(data=st.data())
def test_nothing_but_the_values_matters(data: st.DataObject) -> None:
    """Any batch size, order, split over merges and padding: the same to the bit."""
    fmt = data.draw(st.sampled_from(TRIED))
    norm = data.draw(st.sampled_from([2.0, 2.4]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    tokens = list(torch.randn(12, 1, 8).to(dtype))
    whole = build(fmt, norm=norm)
    for token in tokens:
        whole(token)
    shuffled = torch.stack(data.draw(st.permutations(tokens)))
    cut = data.draw(st.integers(1, 11))
    merged = build(fmt, norm=norm)
    for part in (shuffled[:cut], shuffled[cut:]):
        padded = torch.cat([part, torch.full_like(part, math.nan)], 1)
        mask = torch.tensor([1, 0]).expand(len(part), 2)
        merged.merge(build(fmt, norm=norm)(padded, mask=mask))
    assert_same(merged, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fmt", TRIED)
def test_strange_data(fmt: str, dtype: torch.dtype) -> None:
    zeros = build(fmt)(torch.zeros(3, 4, dtype=dtype)).get_qparams()
    minmax = Observer.load_from_registry(
        "static_minmax", base_name="input", args=QuantizationArgs(**FORMATS[fmt])
    )
    expected = minmax(torch.zeros(3, 4, dtype=dtype)).get_qparams()
    assert torch.equal(zeros["scale"], expected["scale"])
    assert torch.equal(zeros["zero_point"].float(), expected["zero_point"].float())
    for kind in ("denormals", "huge", "constant", "two_values"):
        x = draw(kind, (5, 6), dtype)
        if dtype == torch.float32 and kind == "huge":
            x *= 0.9  # what bfloat16 rounds to infinity is refused
        scale = build(fmt)(x).get_qparams()["scale"]
        assert bool((torch.isfinite(scale) & (scale > 0)).all()), kind
