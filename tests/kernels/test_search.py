from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DISTRIBUTIONS, DTYPES, FORMATS
from geometries import LAYOUTS, pieces

from calipers.kernels import search
from calipers.kernels.counts import count_values
from calipers.kernels.extrema import extrema
from calipers.kernels.search import search_range
from calipers.numerics.formats import Format
from calipers.numerics.layout import flatten_for_calibration
from calipers.numerics.qparams import quantize_dequantize, safe_qparams

INT4 = QuantizationArgs(num_bits=4, group_size=8)
FACTORS = [1 - i / 10 for i in range(10)]


def run(view: torch.Tensor, args: QuantizationArgs = INT4, **options: object) -> torch.Tensor:
    """Search, and return the index of the chosen factor of each piece."""
    options = {"factors": FACTORS, "norm": 2.0, **options}
    found = extrema(view.unsqueeze(-2))
    low, high = search_range(view.unsqueeze(-2), found.min_vals, found.max_vals, args, **options)
    largest = torch.maximum(-found.min_vals, found.max_vals)
    ratio = torch.maximum(-low, high).double() / largest.double()
    return (ratio[..., None] - torch.tensor(options["factors"])).abs().argmin(-1)


def grouped(weight: torch.Tensor) -> torch.Tensor:
    return flatten_for_calibration(weight, "weight", INT4)


def float64_errors(weight: torch.Tensor, norm: float, **options: object) -> np.ndarray:
    low, high = reference.extrema(weight, "weight", INT4)
    return reference.candidate_errors(weight, "weight", INT4, low, high, FACTORS, norm, **options)


@pytest.mark.parametrize("norm", [0.5, 1.0, 2.0, 2.4, 3.0, 7.5])
@pytest.mark.parametrize("distribution", ["gaussian", "student_t", "one_outlier", "positive"])
def test_finds_the_least_error(distribution: str, norm: float) -> None:
    weight = DISTRIBUTIONS[distribution]((5, 24))
    chosen = run(grouped(weight), norm=norm).flatten()
    errors = float64_errors(weight, norm)
    assert (errors[chosen, np.arange(15)] <= errors.min(0) * (1 + 1e-5)).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-9, 1e9, 1e18, 1e30])
@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0])
def test_the_choice_does_not_depend_on_the_unit(scale: float, norm: float) -> None:
    """Errors of huge or tiny values would overflow or vanish in float32."""
    power = 2.0 ** round(np.log2(scale))
    view = grouped(torch.randn(16, 64))
    assert torch.equal(run(view * power, norm=norm), run(view, norm=norm))


def test_pieces_of_very_different_size() -> None:
    """One huge group must not decide for a tiny one."""
    view = grouped(torch.randn(3, 8))
    mixed = view * torch.tensor([2.0**-90, 1.0, 2.0**90])[None, :, None, None]
    assert torch.equal(run(mixed, norm=2.4), run(view, norm=2.4))


def test_weights_count() -> None:
    weight = torch.randn(6, 16)
    importance = np.array([100.0, *[0.01] * 7, *[1.0] * 8])
    weights = torch.from_numpy(importance).reshape(2, 8)
    chosen = run(grouped(weight), weights=weights).flatten()
    errors = float64_errors(weight, 2.0, importance=importance)
    assert (errors[chosen, np.arange(12)] <= errors.min(0) * (1 + 1e-5)).all()
    assert not torch.equal(chosen, run(grouped(weight)).flatten())


@pytest.mark.parametrize("tile", [1, 7, 24, 1 << 18])
@pytest.mark.parametrize("shape", [(1, 5, 3, 8), (6, 4, 8), (9, 1, 24), (1, 1, 100)])
@pytest.mark.parametrize("weighted", [False, True])
def test_tiles_do_not_show(shape: tuple[int, ...], tile: int, weighted: bool) -> None:
    view = torch.randn(shape)
    weights = torch.rand(shape[-2], shape[-1]) if weighted and shape[1] > 1 else None
    whole = run(view, weights=weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(search._TILE, "cpu", tile)
        assert torch.equal(run(view, weights=weights), whole)


def test_a_later_candidate_must_be_strictly_better() -> None:
    zeros = torch.zeros(1, 3, 8)
    low, high = search_range(
        zeros.unsqueeze(-2), zeros[0, :, 0] - 1, zeros[0, :, 0] + 1, INT4, factors=FACTORS, norm=2.0
    )
    assert high.tolist() == [1.0] * 3
    assert low.tolist() == [-1.0] * 3


class TestPatience:
    """Errors that first rise and then fall: the best candidate is the sixth of int2."""

    args = QuantizationArgs(num_bits=2)
    view = torch.tensor([[[1.0, *[0.25] * 30]]])

    def errors(self) -> list[float]:
        low, high = torch.tensor([0.25]), torch.tensor([1.0])
        found = reference.candidate_errors(
            self.view.reshape(-1), "weight", self.args, low, high, FACTORS, 2.0
        )
        return list(found[:, 0])

    def stopped_at(self, patience: int) -> int:
        """Replay the definition by hand."""
        best, best_index, vain = np.inf, 0, 0
        for index, error in enumerate(self.errors()):
            if error < best:
                best, best_index, vain = error, index, 0
            else:
                vain += 1
                if vain >= patience:
                    break
        return best_index

    @pytest.mark.parametrize("patience", [0, 1, 2, 3, 4, 5, 8, 100])
    def test_as_defined(self, patience: int) -> None:
        assert run(self.view, self.args, patience=patience).item() == self.stopped_at(patience)

    def test_the_example_does_what_it_is_there_for(self) -> None:
        assert len({self.stopped_at(patience) for patience in (1, 100)}) > 1

    def test_none_is_endless(self) -> None:
        assert run(self.view, self.args).item() == int(np.argmin(self.errors()))

    def test_one_piece_that_improves_keeps_all_going(self) -> None:
        args = QuantizationArgs(num_bits=2, group_size=31)
        falling = torch.tensor([[[1.0, *[0.4] * 30]]])  # better with each of the first candidates
        together = torch.cat([self.view, falling], 1)
        assert run(self.view, args, patience=1).tolist() == [0]
        assert run(together, args, patience=1).tolist() == [6, 4]

    @pytest.mark.parametrize("patience", [0, 1, 3, 5])
    def test_devices_that_are_not_asked_agree(
        self, patience: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Elsewhere than on a CPU the search runs on, but nothing it finds may count."""
        eager = run(self.view, self.args, patience=patience)
        monkeypatch.setattr(search, "_asks_freely", lambda _: False)
        assert torch.equal(run(self.view, self.args, patience=patience), eager)


def replay(errors: torch.Tensor, patience: int) -> tuple[torch.Tensor, bool]:
    """Follow the definition candidate by candidate; also say whether rounding could decide."""
    least = torch.full(errors.shape[1:], torch.inf, dtype=torch.float64)
    best, vain, close = torch.zeros(errors.shape[1:], dtype=torch.int64), 0, False
    for index, error in enumerate(errors):
        close |= bool(((error - least).abs() < 1e-5 * least).any()) and index > 0
        better = error < least
        least, best[better] = torch.minimum(least, error), index
        vain = 0 if bool(better.any()) else vain + 1
        if vain >= patience:
            break
    return best, close


@pytest.mark.parametrize("shape", [(1, 37, 1, 1, 20), (1, 19, 3, 1, 300), (1, 2, 1, 3, 45_000)])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_patience_of_all_pieces_together(shape: tuple[int, ...], threads: int) -> None:
    """Pieces that are looked at early do not know yet how long patience lasts."""
    factors, decided = [1 - i / 25 for i in range(24)], 0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(40 if shape[-1] < 1000 else 8):
            torch.manual_seed(seed)
            args = QuantizationArgs(num_bits=2 + seed % 3)
            values = torch.randn(shape) * (torch.rand(shape) < 0.2)
            low, high = values.amin((0, -2, -1)), values.amax((0, -2, -1))
            ranges = [(low * torch.tensor(f), high * torch.tensor(f)) for f in factors]
            errors = torch.stack([exact_error(values, *r, args, 2.0) for r in ranges])
            patience = 1 + seed % 5
            best, close = replay(errors, patience)
            if close:
                continue
            decided += 1
            _, found = search_range(
                values, low, high, args, factors=factors, norm=2.0, patience=patience
            )
            assert torch.equal(found.flatten(), (high.flatten() * torch.tensor(factors)[best]))
    finally:
        torch.set_num_threads(before)
    assert decided > 3


def test_float64_is_searched_in_float64() -> None:
    view = torch.randn(1, 3, 8, dtype=torch.float64)
    found = extrema(view.unsqueeze(-2))
    chosen = run(view, factors=[0.7, 0.3])
    low, high = search_range(
        view.unsqueeze(-2), found.min_vals, found.max_vals, INT4, factors=[0.7, 0.3], norm=2.0
    )
    factors = torch.tensor([0.7, 0.3], dtype=torch.float64)[chosen]
    assert torch.equal(low, found.min_vals * factors)
    assert torch.equal(high, found.max_vals * factors)


def test_a_range_wider_than_float16_is_searched() -> None:
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="channel")
    weight = torch.randn(4, 64) * 12000
    weight[:, 0], weight[:, 1] = 50000, -50000
    view = flatten_for_calibration(weight, "weight", args)
    factors = [1 - i / 100 for i in range(20)]
    exact = run(view, args, factors=factors)
    half = run(view.half(), args, factors=factors)
    assert (exact - half).abs().max() <= 1
    assert half.min() > 0


def test_no_factors_leave_the_range() -> None:
    view = torch.randn(1, 3, 8)
    found = extrema(view.unsqueeze(-2))
    low, high = search_range(
        view.unsqueeze(-2), found.min_vals, found.max_vals, INT4, factors=[], norm=2.0, expand=2.0
    )
    assert torch.equal(low, found.min_vals * 2)
    assert torch.equal(high, found.max_vals * 2)


SHRINK = [1 - i / 20 for i in range(12)]
NVFP4 = QuantizationArgs(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    scale_dtype=torch.float8_e4m3fn,
)
MXFP4 = QuantizationArgs(
    num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
)


def exact_error(
    values: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    args: QuantizationArgs,
    norm: float,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The error of every piece under a range, in float64, with the scale as stored."""
    if args.strategy == "tensor_group":
        args = args.model_copy(update={"scale_dtype": None})
    x = values.double().flatten(-2)
    scale, zero = (v.double().unsqueeze(-1) for v in safe_qparams(start, end, args))
    q = quantize_dequantize(x, scale, None if args.symmetric else zero, Format.of(args))
    error = (q - x).abs().pow(norm)
    return (error if weights is None else error * _spread(weights, x)).sum((0, -1)).flatten()


def _spread(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    count = x.shape[1:-1].numel()
    rows = weights.double()[torch.arange(count) % len(weights)]
    return rows.reshape(1, *x.shape[1:])


def check_choice(
    laid_out: torch.Tensor,
    values: torch.Tensor,
    args: QuantizationArgs,
    norm: float,
    weights: torch.Tensor | None = None,
    expand: float = 1.0,
) -> None:
    """The choice is the best one, wherever the two best differ by more than float32 rounding."""
    low, high = values.amin((0, -2, -1)), values.amax((0, -2, -1))
    candidates = [
        [(bound.float() * expand * torch.tensor(factor)).to(bound.dtype) for bound in (low, high)]
        for factor in SHRINK
    ]
    errors = torch.stack([exact_error(values, *c, args, norm, weights) for c in candidates])
    found = search_range(
        laid_out, low, high, args, factors=SHRINK, norm=norm, weights=weights, expand=expand
    )
    least, best = errors.min(0)
    assert (exact_error(values, *found, args, norm, weights) <= least * (1 + 1e-6)).all()
    second = errors.topk(2, dim=0, largest=False).values[1]
    sure = second > least * (1 + 1e-6)
    for side, result in enumerate(found):
        of_all = torch.stack([candidate[side].flatten() for candidate in candidates])
        expected = of_all.gather(0, best[None])[0]
        assert torch.equal(result.flatten()[sure], expected[sure])


@pytest.mark.parametrize(("shape", "memory", "dtype"), LAYOUTS, ids=str)
def test_any_memory(shape: tuple[int, ...], memory: str, dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    check_choice(pieces(memory, shape, values), values, INT4, 2.4)


@pytest.mark.parametrize("norm", [0.7, 1.0, 2.0, 2.4, 3.0, 4.5, 7.9])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("length", [16, 41, 700])
def test_any_format_and_norm(length: int, fmt: str, norm: float) -> None:
    values = torch.randn(1, 20, 3, 1, length)
    check_choice(values, values, QuantizationArgs(**FORMATS[fmt]), norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("args", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
def test_scales_of_their_own_kind(args: QuantizationArgs, dtype: torch.dtype) -> None:
    values = (torch.randn(1, 40, 3, 1, args.group_size) * 0.1).to(dtype)
    check_choice(values, values, args, 2.4, expand=1.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 9, 4, 1, 16), (1, 5, 3, 1, 41), (1, 7, 1, 1, 900)], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_weighted(shape: tuple[int, ...], dtype: torch.dtype, symmetric: bool) -> None:
    values = torch.randn(shape).to(dtype)
    weights = torch.rand(shape[2], shape[-1]) ** 4
    check_choice(values, values, QuantizationArgs(num_bits=4, symmetric=symmetric), 3.0, weights)


def test_weights_that_repeat_otherwise_than_the_columns_of_the_grid() -> None:
    values = torch.randn(1, 6, 4, 1, 20)
    for rows in (1, 2, 8):
        check_choice(values, values, INT4, 2.4, torch.rand(rows, 20) ** 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 9, 4, 1, 16), (1, 7, 1, 1, 900), (3, 1, 2, 1, 50_000)], ids=str
)
def test_strange_values_count_as_zero(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    zeros = torch.randn(shape).to(dtype)
    strange = torch.rand(shape) < 0.1
    zeros[strange] = 0
    low, high = zeros.amin((0, -2, -1)), zeros.amax((0, -2, -1))
    for value in (float("nan"), float("inf"), -float("inf")):
        values = zeros.masked_fill(strange, value)
        found, expected = (
            search_range(x, low, high, INT4, factors=SHRINK, norm=2.4) for x in (values, zeros)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["int4", "int8_asym", "fp8", "fp4"])
def test_the_ends_of_a_dtype_are_searched(fmt: str, dtype: torch.dtype) -> None:
    """Scales are denormal here, or what they stand for is beyond the largest float."""
    args = QuantizationArgs(**FORMATS[fmt])
    limits = torch.finfo(dtype)
    for size in (limits.max, limits.smallest_normal * 64):
        values = ((torch.rand(1, 20, 2, 1, 30) * 2 - 1) * size).to(dtype)
        check_choice(values, values, args, 2.0)


@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0])
@pytest.mark.parametrize("length", [40, 700, 10_000, 300_000])
def test_values_beyond_the_range_count(length: int, norm: float) -> None:
    """As they do for an observer that clips what it finds; here by up to 10,000 times."""
    args, factors = QuantizationArgs(num_bits=8), [1.0, 4.0, 20.0, 100.0, 1000.0, 1e4]
    values = torch.randn(1, 3, 1, 1, length)
    for piece, outlier in enumerate((30.0, 1e3, 1e4)):
        values[0, piece, ..., length // 2] = outlier
    low, high = -torch.ones(3, 1), torch.ones(3, 1)
    _, found = search_range(values, low, high, args, factors=factors, norm=norm)
    errors = torch.stack([exact_error(values, low * f, high * f, args, norm) for f in factors])
    assert found.flatten().tolist() == [factors[i] for i in errors.argmin(0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 1, 1, 32), (64, 1, 2, 1, 32)])
@pytest.mark.parametrize("bits", [4, 8])
def test_zeros_have_no_error_under_any_scale(
    bits: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    zeros = torch.zeros(shape, dtype=dtype)
    args = MXFP4.model_copy(update={"num_bits": bits})
    bound = torch.zeros(shape[1:3], dtype=dtype)
    for low, high in ((bound, bound), (-bound, bound), (bound, -bound)):
        _, found = search_range(zeros, low, high, args, factors=SHRINK, norm=2.4, patience=2)
        assert not found.any()
    found = search_range(zeros, bound - 1, bound + 1, args, factors=SHRINK, norm=2.4)
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
        _, found = search_range(values, low, high, args, factors=factors, norm=2.0)
        expected = torch.stack([r[1].flatten() for r in ranges]).gather(0, errors.argmin(0)[None])
        assert torch.equal(found.flatten(), expected[0])


def test_ranges_need_not_be_contiguous() -> None:
    values = torch.randn(1, 4, 2, 1, 16)
    both = torch.stack([values.amin((0, -2, -1)), values.amax((0, -2, -1))], -1)
    options = {"factors": SHRINK, "norm": 2.4}
    found = search_range(values, both[..., 0], both[..., 1], INT4, **options)
    plain = search_range(values, both[..., 0].clone(), both[..., 1].clone(), INT4, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_weights_without_meaning_are_refused(bad: float) -> None:
    values, weights = torch.randn(1, 2, 1, 1, 4), torch.tensor([[1.0, bad, 1.0, 1.0]])
    bound = torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"finite and not negative"):
        search_range(values, -bound, bound, INT4, factors=[1.0], norm=2.0, weights=weights)


def test_huge_weights_count_by_their_proportions() -> None:
    values = torch.randn(1, 6, 1, 1, 20)
    check_choice(values, values, INT4, 3.0, (torch.rand(1, 20) ** 4).double() * 1e60)


class TestLongPiecesOf16Bits:
    """They are searched over the values that occur."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("fmt", ["int8", "int4_asym", "fp8"])
    @pytest.mark.parametrize("norm", [2.0, 2.4])
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
        found, expected = (search_range(x, low, high, INT4, **options) for x in (strange, values))
        assert found[0][0] == expected[0][0]
        assert found[1][0] == expected[1][0]
        assert found[1][1] == high[1]

    def test_it_is_what_runs(self, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
        counted = []
        monkeypatch.setattr(search, "count_values", lambda x: counted.append(1) or count_values(x))
        values = torch.randn(1, 1, 1, 600, 500)
        for dtype in (torch.float32, torch.bfloat16):
            low, high = extrema(values.to(dtype))[:2]
            search_range(values.to(dtype), low, high, INT4, factors=SHRINK, norm=2.4)
        assert len(counted) == (0 if engine == "torch" else 1)


class TestScalesOfTheNativeKernel:
    """Symmetric scales are worked out in the kernel: as compressed-tensors does, to the bit."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("distribution", ["gaussian", "positive", "negative", "zeros"])
    @pytest.mark.parametrize("fmt", [*FORMATS, "mxfp4", "mxfp8"])
    def test_tables_give_the_same_choice(
        self, fmt: str, distribution: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        args = MXFP4.model_copy(update={"num_bits": int(fmt[-1])}) if "mx" in fmt else None
        args = args or QuantizationArgs(**FORMATS[fmt])
        sizes = 10 ** torch.empty(1, 50, 4, 1, 1).uniform_(-3, 3)
        values = (DISTRIBUTIONS[distribution]((1, 50, 4, 1, 24)) * sizes).to(dtype)
        found = extrema(values)
        made = search_range(values, *found[:2], args, factors=SHRINK, norm=2.4)
        monkeypatch.setattr(search, "_scale_kind", lambda _: "given")
        given = search_range(values, *found[:2], args, factors=SHRINK, norm=2.4)
        assert all(torch.equal(a, b) for a, b in zip(made, given, strict=True))

    @pytest.mark.parametrize("table", [1, 100, 3000])
    def test_tables_may_come_in_parts(self, table: int, monkeypatch: pytest.MonkeyPatch) -> None:
        args = QuantizationArgs(
            num_bits=4, strategy="group", group_size=24, scale_dtype=torch.bfloat16
        )
        values = torch.randn(1, 50, 4, 1, 24)
        found = extrema(values)
        options = {"factors": SHRINK, "norm": 2.4, "patience": 3}
        whole = search_range(values, *found[:2], args, **options)
        monkeypatch.setattr(search, "_TABLE", table)
        parts = search_range(values, *found[:2], args, **options)
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
