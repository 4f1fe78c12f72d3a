"""What is chosen is the best, in any memory, format, dtype and at any size of values."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DISTRIBUTIONS, DTYPES, FORMATS, nvfp4
from engines import with_engines
from exact import INT4, MXFP4, SHRINK, check_choice, exact_error
from geometries import in_any_memory, pieces

from calipers.kernels.native import search
from calipers.kernels.reductions import extrema
from calipers.kernels.search import RangeSearch, search_range


@in_any_memory
def test_any_memory(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    check_choice(pieces(memory, shape, values), values, INT4, 2.4)


@with_engines(
    "length, fmt, norm", [16, 41, 700], list(FORMATS), [0.7, 1.0, 2.0, 2.4, 3.0, 4.5, 7.9]
)
def test_any_format_and_norm(length: int, fmt: str, norm: float) -> None:
    values = torch.randn(1, 20, 3, 1, length)
    check_choice(values, values, QuantizationArgs(**FORMATS[fmt]), norm)


@with_engines("fmt, dtype", ["nvfp4", "mxfp4"], DTYPES)
def test_scales_of_their_own_kind(fmt: str, dtype: torch.dtype) -> None:
    args = {"nvfp4": nvfp4(16), "mxfp4": MXFP4}[fmt]
    values = (torch.randn(1, 40, 3, 1, args.group_size) * 0.1).to(dtype)
    check_choice(values, values, args, 2.4, expand=1.5)


@with_engines(
    "shape, dtype, symmetric",
    [(1, 9, 4, 1, 16), (1, 5, 3, 1, 41), (1, 7, 1, 1, 900)],
    DTYPES,
    [True, False],
)
def test_weighted(shape: tuple[int, ...], dtype: torch.dtype, symmetric: bool) -> None:
    values = torch.randn(shape).to(dtype)
    weights = torch.rand(shape[2], shape[-1]) ** 4
    check_choice(values, values, QuantizationArgs(num_bits=4, symmetric=symmetric), 3.0, weights)


@with_engines("rows", [1, 3])
def test_weights_belong_to_values_of_a_transposed_matrix(rows: int) -> None:
    shape = (1, 6, 3, 5, 9)
    values, weights = torch.randn(shape), torch.rand(rows, 45) ** 4
    check_choice(pieces("transposed", shape, values), values, INT4, 2.4, weights)


def test_weights_that_repeat_otherwise_than_the_columns_of_the_grid() -> None:
    values = torch.randn(1, 6, 4, 1, 20)
    for rows in (1, 2, 8):
        check_choice(values, values, INT4, 2.4, torch.rand(rows, 20) ** 4)


@with_engines("shape, dtype", [(1, 9, 4, 1, 16), (1, 7, 1, 1, 900), (3, 1, 2, 1, 50_000)], DTYPES)
def test_strange_values_count_as_zero(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    zeros = torch.randn(shape).to(dtype)
    strange = torch.rand(shape) < 0.1
    zeros[strange] = 0
    low, high = zeros.amin((0, -2, -1)), zeros.amax((0, -2, -1))
    for value in (float("nan"), float("inf"), -float("inf")):
        values = zeros.masked_fill(strange, value)
        found, expected = (
            search_range(RangeSearch(x, low, high, INT4, factors=SHRINK, norm=2.4))
            for x in (values, zeros)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@with_engines("fmt, dtype", ["int4", "int8_asym", "fp8", "fp4"], DTYPES)
def test_the_ends_of_a_dtype_are_searched(fmt: str, dtype: torch.dtype) -> None:
    """Scales are denormal here, or what they stand for is beyond the largest float."""
    args = QuantizationArgs(**FORMATS[fmt])
    limits = torch.finfo(dtype)
    for size in (limits.max, limits.smallest_normal * 64):
        values = ((torch.rand(1, 20, 2, 1, 30) * 2 - 1) * size).to(dtype)
        check_choice(values, values, args, 2.0)


@with_engines("length, norm", [40, 700, 10_000, 300_000], [2.0, 2.4, 3.0])
def test_values_beyond_the_range_count(length: int, norm: float) -> None:
    """As they do for an observer that clips what it finds; here by up to 10,000 times."""
    args, factors = QuantizationArgs(num_bits=8), [1.0, 4.0, 20.0, 100.0, 1000.0, 1e4]
    values = torch.randn(1, 3, 1, 1, length)
    for piece, outlier in enumerate((30.0, 1e3, 1e4)):
        values[0, piece, ..., length // 2] = outlier
    low, high = -torch.ones(3, 1), torch.ones(3, 1)
    _, found = search_range(RangeSearch(values, low, high, args, factors=factors, norm=norm))
    errors = torch.stack([exact_error(values, low * f, high * f, args, norm) for f in factors])
    assert found.flatten().tolist() == [factors[i] for i in errors.argmin(0)]


@with_engines("bits, shape, dtype", [4, 8], [(1, 3, 1, 1, 32), (64, 1, 2, 1, 32)], DTYPES)
def test_zeros_have_no_error_under_any_scale(
    bits: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    zeros = torch.zeros(shape, dtype=dtype)
    args = MXFP4.model_copy(update={"num_bits": bits})
    bound = torch.zeros(shape[1:3], dtype=dtype)
    for low, high in ((bound, bound), (-bound, bound), (bound, -bound)):
        _, found = search_range(
            RangeSearch(zeros, low, high, args, factors=SHRINK, norm=2.4, patience=2)
        )
        assert not found.any()
    found = search_range(RangeSearch(zeros, bound - 1, bound + 1, args, factors=SHRINK, norm=2.4))
    assert torch.equal(found[1], bound + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_factor_of_zero(dtype: torch.dtype) -> None:
    """The range is empty then, and has the scale that compressed-tensors gives it."""
    values = (torch.randn(1, 30, 1, 1, 32) * 2).to(dtype)
    low, high = values.amin((0, -2, -1)), values.amax((0, -2, -1))
    for args in (MXFP4, INT4, QuantizationArgs(num_bits=8, type="float")):
        factors = [8.0, 0.0]
        ranges = [((low * f).to(dtype), (high * f).to(dtype)) for f in factors]
        errors = torch.stack([exact_error(values, *r, args, 2.0) for r in ranges])
        _, found = search_range(RangeSearch(values, low, high, args, factors=factors, norm=2.0))
        expected = torch.stack([r[1].flatten() for r in ranges]).gather(0, errors.argmin(0)[None])
        assert torch.equal(found.flatten(), expected[0])


def test_ranges_need_not_be_contiguous() -> None:
    values = torch.randn(1, 4, 2, 1, 16)
    both = torch.stack([values.amin((0, -2, -1)), values.amax((0, -2, -1))], -1)
    options = {"factors": SHRINK, "norm": 2.4}
    found = search_range(RangeSearch(values, both[..., 0], both[..., 1], INT4, **options))
    plain = search_range(
        RangeSearch(values, both[..., 0].clone(), both[..., 1].clone(), INT4, **options)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_weights_without_meaning_are_refused(bad: float) -> None:
    values, weights = torch.randn(1, 2, 1, 1, 4), torch.tensor([[1.0, bad, 1.0, 1.0]])
    bound = torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"finite and not negative"):
        search_range(
            RangeSearch(values, -bound, bound, INT4, factors=[1.0], norm=2.0, weights=weights)
        )


def test_huge_weights_count_by_their_proportions() -> None:
    values = torch.randn(1, 6, 1, 1, 20)
    check_choice(values, values, INT4, 3.0, (torch.rand(1, 20) ** 4).double() * 1e60)


class TestLongPiecesOf16Bits:
    """They are searched over the values that occur."""

    @with_engines(
        "norm, fmt, dtype",
        [2.0, 2.4],
        ["int8", "int4_asym", "fp8"],
        [torch.float16, torch.bfloat16],
    )
    def test_the_choice_is_the_same(self, norm: float, fmt: str, dtype: torch.dtype) -> None:
        args = QuantizationArgs(**FORMATS[fmt])
        values = DISTRIBUTIONS["student_t"]((1100, 3, 1, 1, 250)).to(dtype)
        check_choice(values, values, args, norm)

    def test_strange_values_count_as_zero(self) -> None:
        values = torch.randn(1, 2, 1, 600, 500, dtype=torch.bfloat16)
        values[0, 0, 0, :7, 3] = 0
        strange = values.clone()
        strange[0, 0, 0, :4, 3], strange[0, 0, 0, 4:7, 3] = float("nan"), -float("inf")
        strange[0, 1] = float("nan")
        low, high = values.amin((0, -2, -1)), values.amax((0, -2, -1))
        options = {"factors": SHRINK, "norm": 2.4}
        found, expected = (
            search_range(RangeSearch(x, low, high, INT4, **options)) for x in (strange, values)
        )
        assert found[0][0] == expected[0][0]
        assert found[1][0] == expected[1][0]
        assert found[1][1] == high[1]

    def test_it_is_what_runs(self, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
        counted = []
        count = search.distinct_values
        monkeypatch.setattr(search, "distinct_values", lambda x: counted.append(1) or count(x))
        values = torch.randn(1, 1, 1, 600, 500)
        for dtype in (torch.float32, torch.bfloat16):
            low, high = extrema(values.to(dtype))[:2]
            search_range(RangeSearch(values.to(dtype), low, high, INT4, factors=SHRINK, norm=2.4))
        assert len(counted) == (0 if engine == "torch" else 1)


class TestScalesOfTheNativeKernel:
    """Symmetric scales are worked out in the kernel: as compressed-tensors does, to the bit."""

    @with_engines(
        "fmt, distribution, dtype",
        [*FORMATS, "mxfp4", "mxfp8"],
        ["gaussian", "positive", "negative", "zeros"],
        DTYPES,
    )
    def test_tables_give_the_same_choice(
        self, fmt: str, distribution: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        args = MXFP4.model_copy(update={"num_bits": int(fmt[-1])}) if "mx" in fmt else None
        args = args or QuantizationArgs(**FORMATS[fmt])
        sizes = 10 ** torch.empty(1, 50, 4, 1, 1).uniform_(-3, 3)
        values = (DISTRIBUTIONS[distribution]((1, 50, 4, 1, 24)) * sizes).to(dtype)
        found = extrema(values)
        made = search_range(RangeSearch(values, *found[:2], args, factors=SHRINK, norm=2.4))
        monkeypatch.setattr(search, "_scale_source", lambda _: "given")
        given = search_range(RangeSearch(values, *found[:2], args, factors=SHRINK, norm=2.4))
        assert all(torch.equal(a, b) for a, b in zip(made, given, strict=True))

    @pytest.mark.parametrize("table", [1, 100, 3000])
    def test_tables_may_come_in_parts(self, table: int, monkeypatch: pytest.MonkeyPatch) -> None:
        args = QuantizationArgs(
            num_bits=4, strategy="group", group_size=24, scale_dtype=torch.bfloat16
        )
        values = torch.randn(1, 50, 4, 1, 24)
        found = extrema(values)
        options = {"factors": SHRINK, "norm": 2.4, "patience": 3}
        whole = search_range(RangeSearch(values, *found[:2], args, **options))
        monkeypatch.setattr(search, "_TABLE", table)
        parts = search_range(RangeSearch(values, *found[:2], args, **options))
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
