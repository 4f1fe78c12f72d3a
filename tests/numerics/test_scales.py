"""Scales that can be stored are those compressed-tensors can store, and no others matter."""

from __future__ import annotations

import brute
import pytest
import torch
from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale
from compressed_tensors.quantization import QuantizationArgs
from data import EIGHTEEN, draw, nvfp4
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import grid_of

from calipers.numerics.formats import (
    Format,
    Window,
    fine_scales,
    halvable_from,
    magnitudes_of,
    storable_scales,
    windows_of,
)

FORMATS = {
    "int2": QuantizationArgs(num_bits=2),
    "int4": QuantizationArgs(num_bits=4),
    "int8": QuantizationArgs(num_bits=8),
    "int3_asym": QuantizationArgs(num_bits=3, symmetric=False),
    "int4_asym": QuantizationArgs(num_bits=4, symmetric=False),
    "int8_asym": QuantizationArgs(num_bits=8, symmetric=False),
    "fp8": QuantizationArgs(num_bits=8, type="float"),
    "fp8_asym": QuantizationArgs(num_bits=8, type="float", symmetric=False),
    "fp4": QuantizationArgs(num_bits=4, type="float"),
}
MXFP4 = QuantizationArgs(
    num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
)


def windows(fmt: str, signed: bool = False) -> tuple[Window, ...]:
    return windows_of(Format.of(FORMATS[fmt]), signed)


class TestWindows:
    @pytest.mark.parametrize("fmt", FORMATS)
    def test_a_window_is_what_the_codes_stand_for(self, fmt: str) -> None:
        grid = grid_of(FORMATS[fmt])
        zeros = brute.zero_points(FORMATS[fmt])
        assert len(windows(fmt)) == len(zeros)
        for window, zero in zip(windows(fmt), zeros, strict=True):
            assert window.lowest - window.zero == grid[0] - zero
            assert window.highest - window.zero == grid[-1] - zero
            assert window.zero in (0, zero)

    @pytest.mark.parametrize("fmt", ["int2", "int4", "int8"])
    def test_a_negative_scale_mirrors_the_window(self, fmt: str) -> None:
        plain, mirrored = windows(fmt, signed=True)
        assert (mirrored.lowest, mirrored.highest) == (-plain.highest, -plain.lowest)
        assert (mirrored.above, mirrored.below) == (plain.below, plain.above)

    @pytest.mark.parametrize("fmt", FORMATS)
    def test_magnitudes(self, fmt: str) -> None:
        codes = grid_of(FORMATS[fmt])
        # With an integer zero point, a value may be as far from it as the ends are from each other.
        moved = FORMATS[fmt].type == "int" and not FORMATS[fmt].symmetric
        expected = {abs(a - b) for a in codes for b in codes} if moved else {*map(abs, codes)}
        assert magnitudes_of(Format.of(FORMATS[fmt])).tolist() == sorted(expected)


@pytest.mark.parametrize("fmt", FORMATS)
@settings(max_examples=20)
@given(data=st.data())
def test_half_of_a_scale_beyond_the_bound_is_no_worse(fmt: str, data: st.DataObject) -> None:
    """Which is why no scale beyond it is tried. Values are anywhere in the range, scales too."""
    args = FORMATS[fmt]
    signed = fmt in ("int2", "int4", "int8")
    size = data.draw(st.sampled_from([1.0, 0.1, 1000.0]))
    x = torch.tensor(data.draw(st.lists(st.floats(-1, 1), min_size=1, max_size=6))) * size
    number = data.draw(st.integers(0, len(windows(fmt, signed)) - 1))
    window = windows(fmt, signed)[number]
    bound = max(float(x.max()) * window.above, -float(x.min()) * window.below, 1e-6)
    zero = 0.0 if args.symmetric else brute.zero_points(args)[number]
    scales = bound * torch.linspace(1.00001, 8, 100, dtype=torch.float64)
    scales = -scales if signed and number else scales
    of_whole, of_half = (brute.errors(x, part, args, zero) for part in (scales, scales / 2))
    if fmt == "fp8_asym":  # the zero point doubles too
        of_half = brute.all_errors(x, scales / 2, args).amin(0)
    assert (of_half <= of_whole * (1 + 1e-9) + 1e-18 * size**2).all()


@pytest.mark.parametrize("fmt", ["int2", "int4", "int3_asym", "int8", "fp8", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_scale_beyond_the_bounds_is_better(fmt: str, dtype: torch.dtype) -> None:
    """All that can be stored, from the smallest to 8 times the largest value."""
    args = FORMATS[fmt]
    for kind in EIGHTEEN:
        x = draw(kind, (12,), dtype)
        if not x.any():
            continue
        scales = brute.around(brute.floats_of(dtype), x, octaves=300)
        errors = brute.all_errors(x, scales, args)
        halvable = halvable_from(storable_scales(Format.of(args), dtype))
        for window, row in zip(windows(fmt), errors, strict=True):
            bound = max(float(x.max()) * window.above, -float(x.min()) * window.below, halvable)
            inside = scales <= bound * 1.0001
            beyond = row[~inside].min() if (~inside).any() else torch.inf
            assert row[inside].min() <= beyond * (1 + 1e-12)


class TestStorable:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_every_positive_value_of_a_small_float(self, dtype: torch.dtype) -> None:
        scales = storable_scales(Format.of(FORMATS["int4"]), dtype)
        assert scales.dtype == torch.float32
        assert torch.equal(scales.double(), brute.floats_of(dtype))
        assert torch.equal(scales.to(dtype).float(), scales)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_wide_floats_are_not_listed(self, dtype: torch.dtype) -> None:
        assert storable_scales(Format.of(FORMATS["int4"]), dtype) is None

    @pytest.mark.parametrize("size", [1e-6, 1.0, 448.0, 1e6])
    def test_e4m3_under_a_global_scale(self, size: float) -> None:
        global_scale = torch.tensor([size])
        scales = storable_scales(Format.of(nvfp4(16)), torch.bfloat16, global_scale)
        stored = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert torch.equal(scales, stored.float() / global_scale)

    def test_powers_of_two(self) -> None:
        scales = storable_scales(Format.of(MXFP4), torch.bfloat16)
        assert len(scales) == 255  # the exponent 255 is NaN
        stored = compress_mx_scale(scales, torch.uint8)
        assert torch.equal(stored, torch.arange(255, dtype=torch.uint8))
        assert torch.equal(decompress_mx_scale(stored).float(), scales)

    def test_powers_of_two_in_float16(self) -> None:
        scales = storable_scales(Format.of(MXFP4), torch.float16)
        assert torch.equal(scales.half().float(), scales)
        powers = brute.floats_of(torch.float16)
        assert scales.tolist() == powers[torch.frexp(powers).mantissa == 0.5].tolist()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_from_where_halves_can_be_stored(self, dtype: torch.dtype) -> None:
        scales = storable_scales(Format.of(FORMATS["int4"]), dtype)
        first = halvable_from(scales)
        halves = {*scales.tolist()}
        able = [scale / 2 in halves for scale in scales.tolist()]
        at = scales.tolist().index(first)
        assert all(able[at:])
        assert not able[at - 1]

    def test_where_no_half_can_be_stored(self) -> None:
        assert halvable_from(torch.tensor([3.0, 4.0, 5.0])) == torch.finfo(torch.float32).max


@pytest.mark.parametrize("size", [1e-38, 0.3, 1.0, 1e30])
def test_fine_scales(size: float) -> None:
    scales = fine_scales(size)
    assert bool((scales.diff() > 0).all())
    assert float(scales[-1]) > 2 * size
    normal = scales[scales >= torch.finfo(torch.float32).smallest_normal].double()
    steps = normal[1:] / normal[:-1] - 1
    assert float(steps.max()) <= 2**-10
    assert float(normal[0]) <= max(size * 2.0**-29, 2e-38)
