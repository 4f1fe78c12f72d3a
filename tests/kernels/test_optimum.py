"""No scale that can be stored, with any zero point, errs less than the one that is found."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import brute
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DTYPES, EIGHTEEN, draw
from engines import native_only
from geometries import MEMORIES, pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calipers.kernels import describe
from calipers.kernels.optimum import Optimum, best_scales
from calipers.numerics.formats import Format
from calipers.numerics.scales import storable_scales, windows_of

NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": brute.FP8,
}
FP8_ASYM = {"num_bits": 8, "type": "float", "symmetric": False}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
FORMATS: dict[str, dict[str, Any]] = {
    "int2": {"num_bits": 2},
    "int3": {"num_bits": 3},
    "int4": {"num_bits": 4},
    "int8": {"num_bits": 8},
    "int3_signed": {"num_bits": 3},
    "int4_signed": {"num_bits": 4},
    "int3_asym": {"num_bits": 3, "symmetric": False},
    "int4_asym": {"num_bits": 4, "symmetric": False},
    "fp8": {"num_bits": 8, "type": "float"},
    "fp4": {"num_bits": 4, "type": "float"},
    "nvfp4": NVFP4,
    "mxfp4": {"num_bits": 4, **MX},
    "mxfp8": {"num_bits": 8, **MX},
}
INT4 = QuantizationArgs(num_bits=4)


class Search(NamedTuple):
    """How scales are looked for; hashable, so that brute force is asked once for all engines."""

    fmt: str
    dtype: torch.dtype = torch.bfloat16
    norm: float = 2.0

    @property
    def args(self) -> QuantizationArgs:
        return QuantizationArgs(**(FORMATS | {"fp8_asym": FP8_ASYM})[self.fmt])

    @property
    def signed(self) -> bool:
        return self.fmt.endswith("signed")

    @property
    def regret(self) -> float:
        """Under a global scale, scales have 24 bits: without FMA, codes times scales round."""
        has_fma = describe().instruction_set in ("avx2", "avx512")
        return 1e-6 if has_fma or self.fmt != "nvfp4" else 1e-5

    @property
    def rounding(self) -> float:
        """How far float32 is off; roots make more of small differences."""
        return 1e-5 if self.norm >= 1 else 1e-4

    @property
    def global_scale(self) -> Tensor | None:
        return torch.tensor([448 * 6 / 40]) if self.fmt == "nvfp4" else None

    def scales(self, x: Tensor) -> Tensor:
        """All that can be stored, far beyond what can matter; as float32 has them."""
        if self.fmt == "nvfp4":
            return (brute.floats_of(brute.FP8).float() / self.global_scale).double()
        if self.fmt.startswith("mx"):
            ends = (-24, 16) if self.dtype == torch.float16 else (-127, 128)
            return torch.arange(*ends, dtype=torch.float64).exp2()
        return brute.around(brute.floats_of(self.dtype), x)

    def find(self, x: Tensor, weights: Tensor | None = None, keep: int = 1) -> Optimum:
        fmt = Format.of(self.args)
        finite = x.nan_to_num(0.0, 0.0, 0.0)
        return best_scales(
            x,
            finite.amin((0, -2, -1)),
            finite.amax((0, -2, -1)),
            fmt,
            windows=windows_of(fmt, self.signed),
            storable=storable_scales(fmt, self.dtype, self.global_scale),
            norm=self.norm,
            weights=weights,
            keep=keep,
        )

    def error(self, x: Tensor, scale: Tensor, window: Tensor, weights: Tensor | None) -> float:
        """The error of a finding, in float64."""
        if not scale:
            return float((x != 0).sum())
        sign = -1 if self.signed and window else 1
        zero = brute.zero_points(self.args)[0 if self.signed else int(window)]
        found = brute.errors(x, sign * scale.reshape(1), self.args, zero, self.norm, weights)
        return float(found)

    def check(self, x: Tensor, found: Optimum, weights: Tensor | None = None) -> None:
        """Every piece has the best scale, and the error that is claimed for it."""
        values, w = by_piece(x), None if weights is None else by_piece(weights.expand(x.shape))
        parts = zip(*(part.reshape(len(values), -1) for part in found), strict=True)
        for piece, (scales, windows, claims) in enumerate(parts):
            mine = None if w is None else w[piece]
            error = self.error(values[piece], scales[0], windows[0], mine)
            least = least_error(self, values[piece], mine)
            assert error <= least * (1 + self.regret), (piece, error, least)
            assert float(claims[0]) == pytest.approx(error, rel=self.rounding, abs=0)


def by_piece(x: Tensor) -> Tensor:
    """Values of each piece in a row; by a loop, which the kernels do not share."""
    return torch.stack(
        [x[:, i, j].flatten() for i in range(x.shape[1]) for j in range(x.shape[2])]
    ).nan_to_num(0.0, 0.0, 0.0)


_KNOWN: dict[tuple[object, ...], float] = {}


def least_error(search: Search, x: Tensor, weights: Tensor | None) -> float:
    """Brute force, remembered: the engines are asked about the same values."""
    key = (search, tuple(x.tolist()), None if weights is None else tuple(weights.tolist()))
    if key not in _KNOWN:
        scales = search.scales(x)
        found = brute.all_errors(x, scales, search.args, search.norm, weights, search.signed)
        _KNOWN[key] = float(found.min()) if x.any() else 0.0
    return _KNOWN[key]


@cache
def eighteen(length: int, dtype: torch.dtype) -> Tensor:
    """A piece of each distribution."""
    torch.manual_seed(length)
    return torch.stack([draw(kind, (1, 1, length), dtype) for kind in EIGHTEEN], 1)


@pytest.mark.parametrize(
    ("dtype", "weighted"),
    [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)],
)
@pytest.mark.parametrize("fmt", FORMATS)
def test_eighteen_distributions(fmt: str, dtype: torch.dtype, weighted: bool) -> None:
    search, x = Search(fmt, dtype), eighteen(16, dtype)
    weights = torch.linspace(0, 2, 16) ** 2 if weighted else None
    search.check(x, search.find(x, weights), weights)


@pytest.mark.parametrize("norm", [2.4, 1.0, 0.7])
@pytest.mark.parametrize("fmt", ["int3", "int8", "int4_signed", "int3_asym", "fp8", "fp4", "nvfp4"])
def test_norms(fmt: str, norm: float) -> None:
    search, x = Search(fmt, norm=norm), eighteen(16, torch.bfloat16)
    weights = torch.linspace(0, 2, 16) ** 2
    search.check(x, search.find(x))
    search.check(x, search.find(x, weights), weights)


@pytest.mark.parametrize("norm", [2.0, 2.4])
def test_floats_with_a_zero_point(norm: float) -> None:
    search = Search("fp8_asym", norm=norm)
    x = eighteen(3, torch.bfloat16)[:, ::5]
    search.check(x, search.find(x))


@pytest.mark.parametrize("length", [1, 7, 32, 100, 5000])
@pytest.mark.parametrize("fmt", ["int4", "int8", "fp4"])
def test_lengths(fmt: str, length: int) -> None:
    for dtype in DTYPES:
        search, x = Search(fmt), eighteen(length, dtype)[:, :: 1 + length // 50]
        weights = (torch.arange(length) % 5).float() if length > 7 else None
        search.check(x, search.find(x, weights), weights)


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("shape", [(1, 2, 3, 5, 9), (3, 1, 4, 1, 16), (2, 3, 1, 1, 33)], ids=str)
def test_memory(shape: tuple[int, ...], memory: str) -> None:
    for dtype in DTYPES:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        laid_out = pieces(memory, shape, values)
        weights = (torch.arange(values.numel()).reshape(shape) * 37 % 11).float()
        for fmt in ("int4", "int3_asym"):
            search = Search(fmt)
            search.check(values, search.find(laid_out))
            search.check(values, search.find(laid_out, pieces(memory, shape, weights)), weights)


@pytest.mark.parametrize(
    ("fmt", "dtype"), list(zip(["int4_signed", "fp8", "int3_asym"], DTYPES, strict=True))
)
def test_strange_values_count_as_zero(fmt: str, dtype: torch.dtype) -> None:
    x = eighteen(32, dtype).clone()
    strange = torch.arange(x.numel()).reshape(x.shape) % 7
    zeros = x.masked_fill(strange < 3, 0)
    for number, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[strange == number] = value
    found, expected = (Search(fmt).find(values) for values in (x, zeros))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("fmt", ["int4", "int4_signed", "int3_asym", "fp8", "nvfp4", "mxfp4"])
def test_without_any_weight_every_scale_is_as_good(fmt: str) -> None:
    x = eighteen(16, torch.bfloat16)
    found = Search(fmt).find(x, torch.zeros(16))
    assert not found.errors.any()
    assert torch.equal(found.scales.flatten() > 0, by_piece(x).any(1))
    assert bool(torch.isfinite(found.scales).all())


def matter(search: Search, x: Tensor) -> Tensor:
    """The errors of all candidates but those beyond the bound, of which half is no worse."""
    scales = search.scales(x)
    rows = brute.all_errors(x, scales, search.args, search.norm, None, search.signed)
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    windows = windows_of(Format.of(search.args), search.signed)
    bounds = [max(high * window.above, -low * window.below) for window in windows]
    return torch.cat([row[scales <= bound] for row, bound in zip(rows, bounds, strict=True)])


@pytest.mark.parametrize("fmt", ["int4", "int4_signed", "int3_asym", "fp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("norm", [2.0, 0.7])
def test_the_five_best(fmt: str, norm: float) -> None:
    search, x = Search(fmt, norm=norm), eighteen(16, torch.bfloat16)
    found = search.find(x, keep=5)
    for piece, values in enumerate(by_piece(x)):
        scales, windows, claims = (part.reshape(-1, 5)[piece] for part in found)
        if not values.any():
            assert not scales.any()
            continue
        exact = [search.error(values, *pair, None) for pair in zip(scales, windows, strict=True)]
        assert claims.tolist() == pytest.approx(exact, rel=search.rounding, abs=0)
        assert bool((claims.diff() >= 0).all())
        best = matter(search, values).sort().values[:5]
        assert len({*zip(scales.tolist(), windows.tolist(), strict=True)}) >= len(best)
        assert all(ours <= their * (1 + 1e-5) for ours, their in zip(exact, best, strict=False))


def test_fewer_candidates_than_asked_for() -> None:
    fmt = Format.of(INT4)
    one, two = torch.tensor([1.0]), torch.tensor([1.0, 2.0])
    for storable in (one, two):
        found = best_scales(
            torch.tensor([[[[[1.0, 7.0, 3.2]]]]]),
            torch.zeros(1, 1),
            torch.full((1, 1), 7.0),
            fmt,
            windows=windows_of(fmt),
            storable=storable,
            keep=4,
        )
        assert found.scales[0, 0, 0] == 1
        assert {*found.scales.flatten().tolist()} <= {*storable.tolist()}
        assert bool(torch.isfinite(found.errors).all())


@native_only
@pytest.mark.parametrize("fmt", ["int4", "int3_asym", "fp4"])
def test_threads_do_not_matter(fmt: str, engine: str) -> None:
    if engine == "torch":
        pytest.skip("torch has threads of its own")
    x, before = eighteen(32, torch.bfloat16), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            found.append(Search(fmt).find(x, keep=3))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@settings(max_examples=25)
@given(
    fmt=st.sampled_from(["int2", "int4", "int8", "int4_signed", "int3_asym", "fp8", "fp4"]),
    dtype=st.sampled_from(DTYPES),
    norm=st.sampled_from([2.0, 2.4, 1.0, 0.7, 3.5]),
    values=st.lists(st.floats(-4, 4, width=16), min_size=1, max_size=12),
    size=st.sampled_from([1.0, 1e-3, 100.0]),
)
def test_any_values(
    fmt: str, dtype: torch.dtype, norm: float, values: list[float], size: float
) -> None:
    search = Search(fmt, norm=norm)
    x = (torch.tensor(values) * size).to(dtype).reshape(1, 1, 1, 1, -1)
    search.check(x, search.find(x))


# Every float: the sweep


def vertices(x: Tensor, w: Tensor, args: QuantizationArgs, sign: int) -> tuple[Tensor, Tensor]:
    """The best scale of every stretch without a change of code, and Σ w·(x − g·s)² there."""
    grid = torch.from_numpy(brute.grid_of(args))
    middles = (grid[1:] + grid[:-1]) / 2
    changes = (sign * x[:, None] / middles[middles != 0]).flatten()
    changes = changes[changes > 0].unique()
    ends = torch.cat([changes[:1] / 2, changes, changes[-1:] * 2])
    inside = (ends[1:] + ends[:-1]) / 2
    codes = grid[torch.bucketize(sign * x / inside[:, None], middles)]
    lowest = (w * sign * x * codes).sum(1) / (w * codes * codes).sum(1)
    lowest = torch.where(torch.isfinite(lowest), lowest, inside).clamp(ends[:-1], ends[1:])
    return lowest, (w * (codes * lowest[:, None] - sign * x).square()).sum(1)


def find_any(
    x: Tensor, args: QuantizationArgs, signed: bool, weights: Tensor | None, keep: int = 1
) -> Optimum:
    fmt, ends = Format.of(args), (x.amin((0, -2, -1)), x.amax((0, -2, -1)))
    options: dict[str, Any] = {"windows": windows_of(fmt, signed), "storable": None}
    return best_scales(x, *ends, fmt, **options, weights=weights, keep=keep)


SWEPT = ["int2", "int4", "int8", "int4_signed", "fp4", "fp8"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fmt", SWEPT)
def test_the_sweep_finds_the_lowest_vertex(fmt: str, weighted: bool, dtype: torch.dtype) -> None:
    search, x = Search(fmt), eighteen(16, dtype)
    weights = torch.linspace(0, 2, 16) ** 2 if weighted else None
    found = find_any(x, search.args, search.signed, weights)
    assert found.scales.dtype == torch.promote_types(dtype, torch.float32)
    w = torch.ones(16) if weights is None else weights
    for piece, values in enumerate(by_piece(x.double())):
        scale, window, claim = (part.reshape(-1)[piece] for part in found)
        if not values.any():
            assert scale == 0
            continue
        least = min(
            float(vertices(values, w.double(), search.args, sign)[1].min())
            for sign in ((1, -1) if search.signed else (1,))
        )
        error = search.error(values, scale.double(), window, w)
        # A scale is rounded to its dtype, by at most half a step.
        limits = torch.finfo(found.scales.dtype)
        half = max(float(scale) * limits.eps, limits.tiny * limits.eps) / 2
        codes = (values / scale).abs().clamp(max=float(grid_end(search.args)))
        slack = half**2 * float((w * codes.square()).sum())
        slack += 1e-29 * float((w * values.square()).sum())  # float64 rounds too
        assert error <= least * (1 + 1e-6) + 1.01 * slack, (piece, error, least)
        assert float(claim) == pytest.approx(error, rel=1e-6, abs=1.01 * slack)


def grid_end(args: QuantizationArgs) -> float:
    return float(abs(brute.grid_of(args)).max())


@pytest.mark.parametrize("fmt", SWEPT)
def test_no_scale_by_chance_is_better_than_the_sweep(fmt: str) -> None:
    search, x = Search(fmt), torch.randn(1, 6, 1, 1, 40)
    found = find_any(x, search.args, search.signed, None)
    for piece, values in enumerate(by_piece(x)):
        scales = values.abs().max() * torch.rand(4000, dtype=torch.float64) ** 4 * 4
        least = float(brute.all_errors(values, scales, search.args, signed=search.signed).min())
        scale, window = found.scales.reshape(-1)[piece], found.windows.reshape(-1)[piece]
        assert search.error(values, scale.double(), window, None) <= least


@pytest.mark.parametrize("length", [1, 300, 5000])
def test_lengths_of_a_sweep(length: int) -> None:
    x = torch.randn(1, 1, 2, 1, length)
    found = find_any(x, INT4, False, None)
    for piece, values in enumerate(by_piece(x)):
        around_best = found.scales.reshape(-1)[piece] * torch.linspace(0.8, 1.25, 300)
        least = float(brute.errors(values, around_best, INT4).min())
        error = float(brute.errors(values, found.scales.reshape(-1)[piece, None], INT4))
        assert error <= least * (1 + 1e-9) + 1e-14


@pytest.mark.parametrize("fmt", ["int3_asym", "int4_asym"])
@pytest.mark.parametrize("weighted", [False, True])
def test_float32_scales_with_zero_points(fmt: str, weighted: bool) -> None:
    """At least as good as every scale of 8 bits, and what its codes cannot improve any more."""
    search, x = Search(fmt), eighteen(16, torch.float32)
    weights = torch.linspace(0, 2, 16) ** 2 if weighted else None
    w = torch.ones(16).double() if weights is None else weights.double()
    found = find_any(x, search.args, False, weights)
    for piece, values in enumerate(by_piece(x)):
        scale, window, claim = (part.reshape(-1)[piece].double() for part in found)
        if not values.any():
            continue
        error = search.error(values, scale, window, weights)
        total = float((w * values.double().square()).sum())
        assert error <= least_error(search, values, weights) * (1 + 1e-6) + total * 2**-48
        assert float(claim) == pytest.approx(error, rel=1e-5, abs=total * 2**-48)
        zero = brute.zero_points(search.args)[int(window)]
        low, high = brute.grid_of(search.args)[[0, -1]]
        codes = (values.double() / scale + zero).round().clamp(low, high) - zero
        best = (w * values * codes).sum() / (w * codes * codes).sum()
        moved = float((w * (codes * best - values).square()).sum())
        assert error <= moved * (1 + 1e-6) + total * 2**-46


def test_other_norms_cannot_be_swept() -> None:
    x, fmt = torch.randn(1, 1, 1, 1, 4), Format.of(INT4)
    with pytest.raises(ValueError, match="Only squared errors can be minimized"):
        best_scales(
            x,
            x.amin((0, -2, -1)),
            x.amax((0, -2, -1)),
            fmt,
            windows=windows_of(fmt),
            storable=None,
            norm=2.4,
        )
