"""No scale that can be stored, with any zero point, errs less than the one that is found."""

from __future__ import annotations

import brute
import pytest
import torch
from data import DTYPES
from engines import NATIVE_ENGINES, threads_in_use, with_engines
from geometries import MEMORIES, pieces
from hypothesis import given, settings
from hypothesis import strategies as st
from optima import FORMATS, INT4, Search, by_piece, eighteen
from torch import Tensor

from calipers.kernels.optimum import ScaleSearch, best_scales
from calipers.numerics.formats import Format, windows_of


@with_engines("fmt, dtype, weighted", list(FORMATS), [torch.bfloat16, torch.float16], [False, True])
def test_eighteen_distributions(fmt: str, dtype: torch.dtype, weighted: bool) -> None:
    search, x = Search(fmt, dtype), eighteen(16, dtype)
    weights = torch.linspace(0, 2, 16) ** 2 if weighted else None
    search.check(x, search.find(x, weights), weights)


def test_a_value_at_a_tie_does_not_leave_its_dtype() -> None:
    """−1.5 scales become −2, beyond float16; −1 would be as near."""
    search, x = Search("int2", torch.float16), torch.full((1, 2, 1, 1, 16), 43648.0)
    x[..., 0] = torch.tensor([-65472.0, -50000.0])[:, None, None]
    weights = torch.ones(16).index_fill(0, torch.tensor(0), 1e-4)
    found = search.find(x.half(), weights, keep=4)
    search.check(x.half(), found, weights)
    codes = (x[0, :, 0, 0, :1] / found.scales.squeeze(1)).round()
    assert bool(((codes * found.scales.squeeze(1)).abs() <= 65504).all())


@with_engines(
    "fmt, norm",
    ["int3", "int8", "int4_signed", "int3_asym", "fp8", "fp4", "nvfp4"],
    [2.4, 1.0, 0.7],
)
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


@with_engines("fmt, length, dtype", ["int4", "int8", "fp4"], [1, 7, 32, 100, 5000], DTYPES)
def test_lengths(fmt: str, length: int, dtype: torch.dtype) -> None:
    search, x = Search(fmt), eighteen(length, dtype)[:, :: 1 + length // 50]
    weights = (torch.arange(length) % 5).float() if length > 7 else None
    search.check(x, search.find(x, weights), weights)


@with_engines("fmt, weighted", ["int4", "int8", "fp8"], [False, True], engines=NATIVE_ENGINES)
def test_long_pieces_of_16_bits(fmt: str, weighted: bool) -> None:
    """Their errors come from sums over the values that occur, unless those are not exact enough."""
    search, x = Search(fmt, torch.bfloat16), eighteen(800, torch.bfloat16)
    weights = (torch.arange(800) % 5).float() if weighted else None
    search.check(x, search.find(x, weights), weights)


@with_engines("small", [1e-7, 1e-10], engines=NATIVE_ENGINES)
def test_an_error_far_below_what_the_values_weigh(small: float) -> None:
    """All values but one are codes; differences of sums over them exceed its error."""
    x = torch.randint(-127, 128, (1, 1, 1, 1, 800)).bfloat16()
    x[..., 0], x[..., 1] = 127, 0.5
    weights = torch.rand(800) ** 4
    weights[1] = small
    search = Search("int8", torch.bfloat16)
    search.check(x, search.find(x, weights), weights)


@with_engines("fmt, length", ["int8", "fp8"], [16, 800], engines=NATIVE_ENGINES)
def test_the_kernel_leaves_out_scales_that_overflow(
    fmt: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has to be searched again."""
    monkeypatch.setattr("calipers.kernels.native.optimum.optimum_in_torch", None)
    x = (torch.rand(1, 8, 1, 1, length) * 6e4 - 3e4).half()
    x[..., : length // 2] = 65504
    search = Search(fmt, torch.float16)
    search.check(x, search.find(x))


@with_engines(
    "shape, memory, dtype, fmt",
    [(1, 2, 3, 5, 9), (3, 1, 4, 1, 16), (2, 3, 1, 1, 33)],
    list(MEMORIES),
    DTYPES,
    ["int4", "int3_asym"],
)
def test_memory(shape: tuple[int, ...], memory: str, dtype: torch.dtype, fmt: str) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    laid_out = pieces(memory, shape, values)
    weights = (torch.arange(values.numel()).reshape(shape) * 37 % 11).float()
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


@with_engines("dtype", [torch.bfloat16, torch.float16])
def test_values_count_as_often_as_they_occur(dtype: torch.dtype) -> None:
    """Ones are exact under the scale 1, under which the codes of int4 end at 7; tens are rare."""
    x = torch.ones(1, 1, 1, 512, 512, dtype=dtype)
    x[..., 0, :2] = 10
    scales, _, errors = Search("int4", dtype).find(x)
    assert (scales.item(), errors.item()) == (1, 2 * 3**2)


def matter(search: Search, x: Tensor) -> Tensor:
    """The errors of all candidates but those beyond the bound, of which half is no worse."""
    scales = search.scales(x)
    rows = brute.all_errors(x, scales, search.args, search.norm, None, search.signed)
    low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
    windows = windows_of(Format.of(search.args), search.signed)
    bounds = [max(high * window.above, -low * window.below) for window in windows]
    return torch.cat([row[scales <= bound] for row, bound in zip(rows, bounds, strict=True)])


@with_engines(
    "fmt, norm", ["int4", "int4_signed", "int3_asym", "fp8", "nvfp4", "mxfp4"], [2.0, 0.7]
)
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
            ScaleSearch(
                torch.tensor([[[[[1.0, 7.0, 3.2]]]]]),
                torch.zeros(1, 1),
                torch.full((1, 1), 7.0),
                fmt,
                windows=windows_of(fmt),
                storable=storable,
                keep=4,
            )
        )
        assert found.scales[0, 0, 0] == 1
        assert {*found.scales.flatten().tolist()} <= {*storable.tolist()}
        assert bool(torch.isfinite(found.errors).all())


@with_engines("fmt", ["int4", "int3_asym", "fp4"], engines=NATIVE_ENGINES)
def test_threads_do_not_matter(fmt: str) -> None:
    x, found = eighteen(32, torch.bfloat16), []
    for threads in (1, 2, 7):
        with threads_in_use(threads):
            found.append(Search(fmt).find(x, keep=3))
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
