"""No float at all is a better scale than the one that is found."""

from __future__ import annotations

import math
from typing import Any

import brute
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from engines import with_engines
from optima import INT4, Search, by_piece, eighteen, least_error
from torch import Tensor

from calipers.kernels.optimum import Optimum, ScaleSearch, best_scales
from calipers.numerics.formats import Format, windows_of


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
    return best_scales(ScaleSearch(x, *ends, fmt, **options, weights=weights, keep=keep))


SWEPT = ["int2", "int4", "int8", "int4_signed", "fp4", "fp8"]


@with_engines(
    "fmt, weighted, dtype", SWEPT, [False, True], [torch.float32, torch.float64, torch.bfloat16]
)
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


@with_engines("fmt, length", ["int2", "int4", "int8", "fp4"], [7, 300])
def test_the_five_lowest_parabolas(fmt: str, length: int) -> None:
    search = Search(fmt)
    x = torch.randn(1, 4, 1, 1, length, generator=torch.Generator().manual_seed(length)) ** 3
    found = find_any(x, search.args, False, None, keep=5)
    window = windows_of(Format.of(search.args))[0]
    for piece, values in enumerate(by_piece(x)):
        kept, _, errors = (part.reshape(4, 5)[piece].double() for part in found)
        assert len(kept.unique()) == 5
        scales, lowest = vertices(values.double(), torch.ones(length).double(), search.args, 1)
        # Of larger scales, half is no worse.
        most = max(float(values.max()) * window.above, -float(values.min()) * window.below)
        for error in lowest[scales <= most].sort().values[:5]:
            assert error >= errors[-1] * (1 - 1e-6) or torch.isclose(errors, error, rtol=1e-6).any()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


# Where sampled errors say much, little, nothing, or what they must not say.
LONG = {
    "normal": lambda: random(61),
    "heavy tails": lambda: random(61) ** 5,
    "an outlier": lambda: torch.cat([random(60), torch.tensor([-300.0])]),
    "no error": lambda: (random(67) * 40).round() * 0.37,
    "nearly no error": lambda: (random(67) * 40).round() * 0.37 + random(67) * 1e-5,
    "the same value": lambda: torch.full((53,), -0.7),
    "two values": lambda: torch.tensor([1.0, 0.3]).repeat(30),
    "zeros": lambda: torch.where(torch.arange(71) % 9 < 8, 0.0, random(71)),
    "one side": lambda: random(62).abs(),
    "huge": lambda: random(61).clamp(-3.0, 3.0) * 1e38,
    "tiny": lambda: random(61) * 1e-38,
    "far apart": lambda: random(61) * torch.logspace(0, -30, 61),
}
LONG_WEIGHTS = {
    "none": lambda _: None,
    "wide": lambda x: random(len(x)).mul(3).exp(),
    "zeros": lambda x: random(len(x)).clamp(min=0),
    "zero of the largest": lambda x: (x.abs() < x.abs().max() / 2).float(),
    "huge": lambda x: random(len(x)).abs() * 1e37,
    "tiny": lambda x: random(len(x)).abs() * 1e-37,
}


@with_engines("fmt, kind", ["int4_signed", "int8", "fp4", "fp8"], list(LONG))
def test_no_vertex_of_a_long_piece_is_lower(fmt: str, kind: str) -> None:
    search, x = Search(fmt), LONG[kind]()
    for weights in (make(x) for make in LONG_WEIGHTS.values()):
        found = find_any(x.reshape(1, 1, 1, 1, -1), search.args, search.signed, weights)
        scale, window = found.scales.flatten()[0].double(), found.windows.flatten()[0]
        w = torch.ones(len(x)).double() if weights is None else weights.double()
        total = float((w * x.double().square()).sum())
        if total == 0:
            continue
        # In units in which float64 squares nothing away.
        unit = 2.0 ** -round(math.log2(float(x.abs().max())))
        w, values = w / w.max(), x.double() * unit
        total = float((w * values.square()).sum())
        least = least_of_vertices(fmt, kind, values, w)
        error = search.error(values, scale * unit, window, w)
        step = max(float(scale) * 2.0**-24, 2.0**-150) * unit
        codes = (values / (scale * unit)).abs().clamp(max=grid_end(search.args))
        slack = step**2 * float((w * codes.square()).sum())
        slack += 2 * step * math.sqrt(least * float((w * codes.square()).sum())) * 1e-6
        assert error <= least * (1 + 1e-9) + 1.01 * slack + 1e-14 * total, (error, least)


_LEAST: dict[object, float] = {}


def least_of_vertices(fmt: str, kind: str, x: Tensor, w: Tensor) -> float:
    """Brute force, remembered: the engines are asked about the same values."""
    search, key = Search(fmt), (fmt, kind, tuple(w.tolist()))
    if key not in _LEAST:
        signs = (1, -1) if search.signed else (1,)
        _LEAST[key] = min(float(vertices(x, w, search.args, sign)[1].min()) for sign in signs)
    return _LEAST[key]


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
            ScaleSearch(
                x,
                x.amin((0, -2, -1)),
                x.amax((0, -2, -1)),
                fmt,
                windows=windows_of(fmt),
                storable=None,
                norm=2.4,
            )
        )
