"""What is worked out from counts, against raw values and slow definitions in float64."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from data import DISTRIBUTIONS
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import assert_same
from pairwise import pairwise
from reference import grid_of, round_to_grid

from calipers import errors
from calipers.observers import Observer

build = Observer.load_from_registry

INT8 = QuantizationArgs(num_bits=8)
FORMATS = {
    "int8": INT8,
    "int8_asym": QuantizationArgs(num_bits=8, symmetric=False),
    "fp8": QuantizationArgs(num_bits=8, type="float"),
    "fp8_asym": QuantizationArgs(num_bits=8, type="float", symmetric=False),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
OPTIONS = {"value_counts": {}, "percentile": {"percentile": 90}, "entropy": {"bins": 300}}


def observer_of(name: str, fmt: str = "int8", base_name: str = "input", **options: object):
    return build(name, base_name=base_name, args=FORMATS[fmt], **{**OPTIONS[name], **options})


def draw_values(kind: str, dtype: torch.dtype, count: int = 400) -> torch.Tensor:
    return DISTRIBUTIONS[kind]((count, 1)).to(dtype)


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=20)
@given(data=st.data())
def test_nothing_but_the_values_matters(name: str, data: st.DataObject) -> None:
    """Any batch size, order, split over merges and padding: the same to the bit."""
    fmt = data.draw(st.sampled_from(sorted(FORMATS)))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES[:3]), min_size=1, max_size=2))
    tokens = [token.to(dtype) for dtype in dtypes for token in torch.randn(12, 1, 8)]
    whole = observer_of(name, fmt)
    for token in tokens:
        whole(token)
    shuffled = data.draw(st.permutations(tokens))
    cut = data.draw(st.integers(0, len(tokens)))
    merged = observer_of(name, fmt)
    for part in (shuffled[:cut], shuffled[cut:]):
        other = observer_of(name, fmt)
        for dtype in {token.dtype for token in part}:
            batch = torch.stack([token for token in part if token.dtype == dtype])
            padded = torch.cat([batch, torch.full_like(batch, math.nan)], 1)
            mask = torch.tensor([1, 0]).expand(len(batch), 2)
            other(padded, mask=mask)
        merged.merge(other)
    assert_same(merged, whole)


# percentile


def beyond(x: torch.Tensor, low: float, high: float, symmetric: bool) -> tuple[int, ...]:
    """How many values are left out: on both sides together, or on each."""
    below, above = int((x < low).sum()), int((x > high).sum())
    return (below + above,) if symmetric else (below, above)


def outer_edge(value: float) -> float:
    """The end, away from zero, of what is rounded to a bf16 value: half way to the next."""
    neighbour = torch.tensor(value).bfloat16().view(torch.int16).add(1).view(torch.bfloat16)
    return (value + float(neighbour)) / 2


@pytest.mark.parametrize("fmt", ["int8", "int8_asym"])
@pytest.mark.parametrize("dtype", DTYPES)
@given(
    kind=st.sampled_from(sorted(DISTRIBUTIONS)),
    percentile=st.sampled_from([0.1, 50, 90, 99, 99.5, 99.9, 99.99, 100]),
    count=st.integers(1, 1000),
)
def test_percentile_of_raw_values(
    fmt: str, dtype: torch.dtype, kind: str, percentile: float, count: int
) -> None:
    x = draw_values(kind, dtype, count)
    low, high = (
        float(end) for end in observer_of("percentile", fmt, percentile=percentile)(x).get_range()
    )
    symmetric = FORMATS[fmt].symmetric
    share = (100 - Fraction(str(percentile))) * count / (100 if symmetric else 200)
    x = x.double().flatten()
    assert all(left_out <= share for left_out in beyond(x, low, high, symmetric))
    assert x.min() <= low <= high <= x.max()
    if percentile == 100:
        assert (low, high) == (x.min(), x.max())
    narrower = (
        [v for v in x.unique().tolist() if -v < -low],
        [v for v in x.unique().tolist() if v < high],
    )
    if dtype.itemsize > 2:
        return
    # The smallest such ends: one value further in, too much would be left out.
    if symmetric:
        inner = x.abs()[x.abs() < max(-low, high)]
        if len(inner):
            assert beyond(x, -float(inner.max()), float(inner.max()), True)[0] > share
        return
    assert not narrower[1] or beyond(x, low, narrower[1][-1], False)[1] > share
    assert not narrower[0] or beyond(x, narrower[0][0], high, False)[0] > share


@given(st.integers(1, 60), st.sampled_from([50, 90, 99, 99.9]))
def test_wide_floats_end_at_the_edge_of_their_bin(count: int, percentile: float) -> None:
    x = torch.randn(count, 1)
    high = float(observer_of("percentile", percentile=percentile)(-x.abs()).get_range()[0].neg())
    rounded = x.abs().bfloat16().float().flatten().sort().values
    kept = count - math.floor((100 - Fraction(str(percentile))) * count / 100)
    edge = outer_edge(float(rounded[kept - 1]))
    assert high == min(edge, float(x.abs().max()))


def test_percentile_is_the_decimal_number_it_is_written_as() -> None:
    """In binary, a share of 100 − 99.9 percent is a little less than one in a thousand."""
    x = torch.ones(1000, 1, dtype=torch.bfloat16)
    x[0] = 50
    assert observer_of("percentile", percentile=99.9)(x).get_range()[1] == 1
    assert observer_of("percentile", percentile=99.91)(x).get_range()[1] == 50


@pytest.mark.parametrize("fmt", ["int8", "int8_asym"])
@pytest.mark.parametrize("sign", [1, -1])
def test_float64_is_never_clipped_by_rounding_twice(fmt: str, sign: int) -> None:
    """As float32, the value is the edge of a bin itself, and belongs to a bin it is not in."""
    for value in (1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40):
        x = sign * torch.tensor([[value] * 8 + [0.5, 5.0]], dtype=torch.float64).T
        low, high = observer_of("percentile", fmt, percentile=80)(x).get_range()
        assert low <= sign * value <= high


# entropy


def divergences(x: np.ndarray, low: float, high: float, args: QuantizationArgs, bins: int, dtype):
    """The divergence of every candidate, bin by bin, from the widest on; and their ends."""
    width = (high - low) / bins
    histogram = np.zeros(bins)
    for value in x[x != 0]:
        histogram[min(max(math.floor((value - low) / (high - low) * bins), 0), bins - 1)] += 1
    centres = low + (np.arange(bins) + 0.5) * width
    found = []
    p = histogram / histogram.sum()
    for kept in range(bins, len(grid_of(args)) - 1, -1):
        ends = [
            torch.tensor([v * (kept / bins)], dtype=torch.float64).to(dtype) for v in (low, high)
        ]
        scale, zero_point = (float(v) for v in calculate_qparams(*ends, args))
        shifted = centres / scale + (0 if args.symmetric else zero_point)
        if args.type == "float":
            shifted = shifted.astype(np.float32)  # on its way to fp8, which matters for ties
        codes = round_to_grid(shifted.astype(np.float64), args)
        q = np.zeros(bins)
        for code in set(codes):
            here = (codes == code) & (p > 0)
            q[here] = p[here].mean() if here.any() else 0
        found.append((float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum()), ends))
    return found


@pytest.mark.parametrize(
    ("fmt", "kind", "dtype"),
    pairwise(list(FORMATS), sorted(set(DISTRIBUTIONS) - {"zeros"}), DTYPES[:3]),
)
def test_entropy_by_its_definition(fmt: str, kind: str, dtype: torch.dtype) -> None:
    args, bins, x = FORMATS[fmt], 311, draw_values(kind, dtype, 1500)
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    if args.symmetric:
        low, high = -max(-low, high), max(-low, high)
    counted = x.float().bfloat16() if dtype == torch.float32 else x
    expected = divergences(counted.double().flatten().numpy(), low, high, args, bins, dtype)
    least = min(divergence for divergence, _ in expected)
    found = torch.stack(observer_of("entropy", fmt, bins=bins)(x).get_range())
    near = [ends for divergence, ends in expected if divergence <= least + 1e-10]
    cut = [torch.stack([torch.maximum(a, x.min()), torch.minimum(b, x.max())]) for a, b in near]
    assert any(torch.equal(found, ends) for ends in cut)


def test_entropy_clips_a_lone_outlier() -> None:
    x = torch.randn(100_000, 1)
    x[0] = 40.0
    assert 3 < observer_of("entropy", bins=2048)(x).get_range()[1] < 15


# all of them


@pytest.mark.parametrize(
    ("name", "fmt", "dtype", "values"),
    pairwise(
        list(OPTIONS),
        list(FORMATS),
        DTYPES,
        [[[0.0]], [[-0.0, 0.0]], [[3.0]], [[-3.0]], [[0.7] * 9], [[1e-7, -6e-8]], [[1e-40]]],
    ),
)
def test_strange_data(name: str, fmt: str, dtype: torch.dtype, values: list[list[float]]) -> None:
    observer = observer_of(name, fmt)(torch.tensor(values).to(dtype))
    plain = build("static_minmax", base_name="input", args=FORMATS[fmt])(
        torch.tensor(values).to(dtype)
    )
    scale, zero_point = observer
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    assert torch.isfinite(zero_point.float()).all()
    if name != "entropy" and len(set(values[0])) == 1:
        assert torch.equal(scale, plain.get_qparams()["scale"])
    assert torch.equal(scale, next(iter(observer)))


@pytest.mark.parametrize("name", OPTIONS)
def test_heads_stand_alone(name: str) -> None:
    args = QuantizationArgs(num_bits=8, type="float", strategy="attn_head")
    x = torch.randn(2, 3, 50, 4) * torch.tensor([1.0, 10.0, 0.1]).reshape(1, 3, 1, 1)
    scale = build(name, base_name="k", args=args, **OPTIONS[name])(x).get_qparams()["scale"]
    assert scale.shape == (3, 1, 1)
    for head in range(3):
        alone = build(name, base_name="k", args=args, **OPTIONS[name])(x[:, head : head + 1])
        assert torch.equal(alone.get_qparams()["scale"], scale[head : head + 1])


@pytest.mark.parametrize("name", OPTIONS)
def test_a_head_without_finite_values(name: str) -> None:
    args = QuantizationArgs(num_bits=8, strategy="attn_head")
    options = {**OPTIONS[name], "nonfinite": "ignore"}
    x = torch.randn(1, 2, 20, 4)
    x[:, 1] = math.nan
    observer = build(name, base_name="k", args=args, **options)(x)
    assert observer.num_nonfinite == 80
    assert [float(end.flatten()[1]) for end in observer.get_range()] == [0, 0]
    assert torch.isfinite(observer.get_qparams()["scale"]).all()


class TestAdopt:
    def test_any_solver_and_format(self) -> None:
        x = torch.randn(60, 8, dtype=torch.bfloat16)
        measured = observer_of("value_counts")(x)
        for name in OPTIONS:
            for fmt in FORMATS:
                adopted = observer_of(name, fmt)(torch.ones(3, 8) * 100).adopt(measured)
                assert_same(adopted, observer_of(name, fmt)(x))

    def test_is_a_copy(self) -> None:
        measured = observer_of("value_counts")(torch.ones(2, 4))
        adopted = observer_of("percentile").adopt(measured)
        measured(torch.ones(3, 4))
        assert adopted.counts_bfloat16.sum() == 8
        adopted(torch.ones(1, 4))
        assert (adopted.counts_bfloat16.sum(), measured.counts_bfloat16.sum()) == (12, 20)

    def test_of_nothing_is_nothing(self) -> None:
        adopted = observer_of("percentile")(torch.ones(2, 4)).adopt(observer_of("entropy"))
        assert not adopted.fields()

    def test_of_another_tensor(self) -> None:
        observer = observer_of("percentile")(torch.ones(2, 4))
        with pytest.raises(errors.MergeError) as caught:
            observer.adopt(observer_of("value_counts", base_name="output")(torch.ones(2, 4)))
        assert str(caught.value) == (
            "Cannot adopt by Observer 'percentile' (input): the configurations differ.\n"
            "  base_name: 'input' here, 'output' there"
        )
        with pytest.raises(errors.MergeError, match="cannot adopt a StaticMinMaxObserver: no"):
            observer.adopt(build("static_minmax", args=INT8))
        assert observer.num_observed_tokens == 2


class TestBadInput:
    @pytest.mark.parametrize("value", [0, -1, 101, math.nan, math.inf])
    def test_percentile(self, value: float) -> None:
        with pytest.raises(errors.ConfigurationError) as caught:
            observer_of("percentile", percentile=value)
        assert str(caught.value) == (
            f"Observer 'percentile': percentile must be in (0, 100], got {float(value)}."
        )

    @pytest.mark.parametrize("value", [0, 255, 65537])
    def test_bins(self, value: int) -> None:
        with pytest.raises(errors.ConfigurationError) as caught:
            observer_of("entropy", bins=value)
        assert str(caught.value) == (
            f"Observer 'entropy': bins must be from 256 to 65536, got {value}."
        )

    @pytest.mark.parametrize("name", OPTIONS)
    def test_strategy(self, name: str) -> None:
        args = QuantizationArgs(num_bits=8, strategy="group", group_size=4)
        with pytest.raises(errors.UnsuitableError) as caught:
            build(name, base_name="input", args=args)
        assert str(caught.value) == (
            f"Observer '{name}' (input): values are counted per tensor or per head (strategies "
            "tensor and attn_head), not per 'group'. Use 'static_minmax' or 'mse' for this "
            "strategy."
        )

    @pytest.mark.parametrize(
        ("args", "what"),
        [
            (QuantizationArgs(num_bits=4), "int4"),
            (QuantizationArgs(num_bits=4, type="float"), "float4"),
        ],
    )
    def test_format(self, args: QuantizationArgs, what: str) -> None:
        with pytest.raises(errors.UnsuitableError) as caught:
            build("entropy", base_name="input", args=args)
        assert str(caught.value) == (
            "Observer 'entropy' (input): entropy compares distributions of 8-bit codes, int8 or "
            f"fp8, not {what}. Use 'percentile' or 'mse' for this format."
        )

    @pytest.mark.parametrize(
        ("dtype", "value"), [(torch.float32, -3.3962e38), (torch.float64, 1e39)]
    )
    def test_values_beyond_bfloat16(self, dtype: torch.dtype, value: float) -> None:
        observer = observer_of("value_counts")(torch.ones(1, 2))
        x = torch.tensor([[1.0, value]], dtype=dtype)
        with pytest.raises(errors.TensorValueError) as caught:
            observer(x)
        assert str(caught.value) == (
            f"Observer 'value_counts' (input) was given values from {float(x.min()):g} to "
            f"{float(x.max()):g} ({dtype}). They are counted as bfloat16, which ends at "
            "±3.38953e+38. Nothing was recorded. Scale the tensor down, or use 'static_minmax'."
        )
        assert_same(observer, observer_of("value_counts")(torch.ones(1, 2)))

    def test_the_largest_that_can_be_counted(self) -> None:
        most = torch.tensor([[0x7F7F7FFF, 0]], dtype=torch.int32).view(torch.float32)
        assert observer_of("percentile")(most).get_range()[1] == most.max()

    @pytest.mark.parametrize("name", OPTIONS)
    def test_mask_of_the_wrong_shape(self, name: str) -> None:
        observer = observer_of(name)
        with pytest.raises(errors.LayoutError, match=r"shape \(2, 3\), got \(2, 4\)"):
            observer(torch.ones(2, 3, 8), mask=torch.ones(2, 4))
        assert not observer.fields()

    def test_heads_that_change(self) -> None:
        args = QuantizationArgs(num_bits=8, strategy="attn_head")
        observer = build("value_counts", base_name="k", args=args)(torch.ones(1, 2, 3, 4))
        with pytest.raises(errors.DataError, match="and now one of shape"):
            observer(torch.ones(1, 3, 3, 4))
        assert_same(
            observer, build("value_counts", base_name="k", args=args)(torch.ones(1, 2, 3, 4))
        )
