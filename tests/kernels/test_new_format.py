"""A format is a row: one that is added here is quantized, searched and observed like any other.

What is right is worked out in float64 from numbers that are written down.
"""

from __future__ import annotations

import brute
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DTYPES
from engines import NATIVE_ENGINES, native_only, with_engines
from torch import Tensor

from calipers.errors import ConfigurationError
from calipers.kernels.native import BACKEND
from calipers.kernels.operations import Workload
from calipers.kernels.optimum import ScaleSearch, best_scales
from calipers.kernels.rounding import Quantization, quantization_errors
from calipers.kernels.search import RangeSearch, search_range
from calipers.numerics.formats import GRIDS, Floats, Format, storable_scales, windows_of
from calipers.numerics.qparams import qparams_of
from calipers.observers import Observer

ROWS = {
    "e2m3": Floats(2, 3, 0, 7.5),
    "e3m2": Floats(3, 2, -2, 28.0),
    "e2m2": Floats(2, 2, 0, 7.0),  # which the native kernels do not know
}
NUMBERS = {
    "e2m3": [i / 8 for i in range(16)]
    + [i / 4 for i in range(8, 16)]
    + [i / 2 for i in range(8, 16)],
    "e3m2": [i / 16 for i in range(8)]
    + [0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5]
    + [4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28],
    "e2m2": [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7],
}
FACTORS = [1 - i / 100 for i in range(20)]  # as memoryless_mse tries them


@pytest.fixture(autouse=True)
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    name = request.getfixturevalue("name")
    monkeypatch.setitem(GRIDS, ("float", ROWS[name].bits), ROWS[name])


def arguments(name: str, **more: object) -> QuantizationArgs:
    cut = {"strategy": "group", "group_size": 32, "zp_dtype": torch.int8}
    return QuantizationArgs(num_bits=ROWS[name].bits, type="float", **{**cut, **more})


def nearest(x: Tensor, name: str) -> Tensor:
    """The nearest number, of two the one with the even code; by trying all of them."""
    numbers = torch.tensor(NUMBERS[name], dtype=torch.float64)
    distance = (x.double().abs().unsqueeze(-1) - numbers).abs()
    order = torch.arange(len(numbers))
    near = distance == distance.amin(-1, keepdim=True)
    last = torch.where(near, order, -1).amax(-1)
    first = torch.where(near, order, len(numbers)).amin(-1)
    return numbers[torch.where(last % 2 == 0, last, first)] * x.double().sign()


def errors(x: Tensor, scales: Tensor, name: str, norm: float = 2.0) -> Tensor:
    """Σ|q−x|^norm of each piece, (pieces, values), under each of some scales: (pieces, scales)."""
    x, scales = x.double().unsqueeze(-2), scales.double().unsqueeze(-1)
    numbers = torch.tensor(NUMBERS[name], dtype=torch.float64)
    codes = torch.bucketize((x / scales).abs(), (numbers[1:] + numbers[:-1]) / 2)  # ties err alike
    return (numbers[codes] * scales - x.abs()).abs().pow(norm).sum(-1)


def weight(dtype: torch.dtype, columns: int = 32) -> Tensor:
    torch.manual_seed(columns)
    return (torch.randn(6, columns) * torch.logspace(-2, 2, 6)[:, None]).to(dtype)


def extrema(pieces: Tensor) -> tuple[Tensor, Tensor]:
    return pieces.amin((0, -2, -1)), pieces.amax((0, -2, -1))


@with_engines("name", list(ROWS), engines=["torch"])
class TestNumbers:
    def test_values(self, name: str) -> None:
        positive = NUMBERS[name]
        assert (
            Format.of(arguments(name)).values().tolist() == [-x for x in positive[:0:-1]] + positive
        )

    @pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
    def test_rounding(self, name: str, dtype: torch.dtype) -> None:
        """Numbers, the middles between them, what lies beside both, and anything."""
        numbers = torch.tensor(NUMBERS[name], dtype=dtype)
        exact = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
        x = torch.cat([exact, exact.nextafter(exact + 1), exact.nextafter(exact - 1)])
        x = torch.cat([x, torch.randn(1000, dtype=dtype) * 3]).clamp(-numbers[-1], numbers[-1])
        x = torch.cat([x, -x])
        fmt = Format.of(arguments(name))
        assert torch.equal(fmt.round_(x.clone()).double(), nearest(x, name))

    def test_what_it_is_called(self, name: str) -> None:
        fmt = Format.of(arguments(name))
        assert fmt.name == f"float{fmt.bits}"
        assert fmt.grid.native_name == name

    def test_a_zero_point_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigurationError, match=f"Asymmetric fp{ROWS[name].bits} is not"):
            Format.of(arguments(name, symmetric=False))


@native_only
@with_engines("name", list(ROWS), engines=NATIVE_ENGINES[:1])
def test_a_row_that_the_native_kernels_do_not_have_is_left_to_torch(name: str) -> None:
    workload = Workload((torch.ones(1),), Format.of(arguments(name)))
    assert BACKEND.accepts(workload) == (name != "e2m2")


@with_engines("name, dtype, norm", list(ROWS), DTYPES, [2.0, 2.4, 3.0])
class TestKernels:
    def test_quantize(self, name: str, dtype: torch.dtype, norm: float) -> None:
        args, x = arguments(name), weight(dtype, 96)[None, :, None, None]
        scale, _ = qparams_of(*(end.float() * 0.8 for end in extrema(x)), args)
        scale = scale.reshape(6, 1)
        expected = (
            nearest(x.float() / scale[..., None, None], name).float() * scale[..., None, None]
        )
        found = quantization_errors(Quantization(x, scale, None, args, norm))
        exact = (expected.double() - x).abs().pow(norm).sum((0, -2, -1))
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=0)

    @pytest.mark.parametrize("columns", [32, 300])  # in lanes, and along them
    def test_search(self, name: str, dtype: torch.dtype, norm: float, columns: int) -> None:
        args, x = arguments(name), weight(dtype, columns)[None, :, None, None]
        low, high = extrema(x)
        ranges = [[(end.float() * f).to(dtype) for end in (low, high)] for f in FACTORS]
        scales = torch.stack([torch.maximum(-a, b) / NUMBERS[name][-1] for a, b in ranges], -1)
        least = errors(x.flatten(0, -2), scales.flatten(0, -2), name, norm).amin(-1)
        start, end = search_range(RangeSearch(x, low, high, args, factors=FACTORS, norm=norm))
        chosen = torch.maximum(-start, end) / NUMBERS[name][-1]
        found = errors(x.flatten(0, -2), chosen.reshape(6, 1), name, norm).squeeze(-1)
        assert (found <= least * (1 + 1e-5)).all()

    def test_best_scales(self, name: str, dtype: torch.dtype, norm: float) -> None:
        fmt, x = Format.of(arguments(name)), weight(dtype)[None, :, None, None]
        found = best_scales(
            ScaleSearch(
                x,
                *extrema(x),
                fmt,
                windows=windows_of(fmt),
                storable=storable_scales(fmt, torch.bfloat16),
                norm=norm,
            )
        )
        for values, scale, error in zip(
            x.flatten(0, -2), found.scales.flatten(), found.errors.flatten(), strict=True
        ):
            every = brute.around(brute.floats_of(torch.bfloat16), values)
            least = errors(values[None], every[None], name, norm).min()
            mine = errors(values[None], scale.reshape(1, 1), name, norm).item()
            assert mine <= least * (1 + 1e-5)
            assert error.item() == pytest.approx(mine, rel=1e-4)


@with_engines("name, dtype", list(ROWS), DTYPES)
def test_every_float_is_a_scale(name: str, dtype: torch.dtype) -> None:
    """Where a float32 scale is stored, none of thousands around the one found is better."""
    fmt, x = Format.of(arguments(name)), weight(dtype)[None, :, None, None]
    found = best_scales(ScaleSearch(x, *extrema(x), fmt, windows=windows_of(fmt), storable=None))
    rows, scales = x.flatten(0, -2), found.scales.reshape(6, 1)
    tried = scales * torch.logspace(-2, 1, 5000, base=2, dtype=torch.float64)
    assert (
        errors(rows, scales, name) <= errors(rows, tried, name).amin(-1, True) * (1 + 1e-6)
    ).all()


@with_engines("name, dtype", list(ROWS), DTYPES)
class TestObservers:
    def observe(self, observer: str, args: QuantizationArgs, x: Tensor) -> Tensor:
        found = Observer.load_from_registry(observer, base_name="weight", args=args)(
            x
        ).get_qparams()
        assert not found["zero_point"].any()
        return found["scale"]

    def test_minmax(self, name: str, dtype: torch.dtype) -> None:
        x = weight(dtype)
        scale = self.observe("minmax", arguments(name), x)
        exact = x.double().abs().amax(1, keepdim=True) / NUMBERS[name][-1]
        assert torch.equal(scale, exact.to(dtype))

    def test_powers_of_two(self, name: str, dtype: torch.dtype) -> None:
        """The largest value gets the exponent of the largest number; from 1.75 on, one less."""
        x = weight(dtype)
        args = arguments(name, scale_dtype=torch.uint8)
        largest = x.double().abs().amax(1, keepdim=True)
        power = (largest * 8 / 7).log2().floor().exp2()
        top = {"e2m3": 4, "e3m2": 16, "e2m2": 4}[name]
        assert torch.equal(self.observe("minmax", args, x).double(), power / top)

    def test_memoryless_mse(self, name: str, dtype: torch.dtype) -> None:
        endless = {"observer_kwargs": {"patience": len(FACTORS)}}
        for more in ({}, {"scale_dtype": torch.uint8}):
            args, x = arguments(name, **endless, **more), weight(dtype)
            low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
            tried = [[(end.float() * f).to(dtype) for end in (low, high)] for f in FACTORS]
            scales = torch.cat([qparams_of(*ends, args)[0] for ends in tried], -1)
            found = self.observe("memoryless_mse", args, x)
            least = errors(x, scales, name, 2.4).amin(-1, True)
            assert (errors(x, found, name, 2.4) <= least * (1 + 1e-5)).all()

    def test_optimal(self, name: str, dtype: torch.dtype) -> None:
        x = weight(torch.bfloat16 if dtype == torch.float32 else dtype)
        plain = {"observer_kwargs": {"importance": "none"}}
        scale = self.observe("optimal", arguments(name, **plain), x)
        for row, found in zip(x, scale, strict=True):
            every = brute.around(brute.floats_of(x.dtype), row)
            least = errors(row[None], every[None], name).min()
            assert errors(row[None], found[None], name).item() <= least * (1 + 1e-5)
        powers = self.observe("optimal", arguments(name, scale_dtype=torch.uint8, **plain), x)
        every = torch.arange(-24, 16, dtype=torch.float64).exp2()
        least = errors(x, every.expand(6, -1), name).amin(-1, True)
        assert (errors(x, powers, name) <= least * (1 + 1e-5)).all()
