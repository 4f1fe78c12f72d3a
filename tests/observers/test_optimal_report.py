"""Reports, and what an observer remembers."""

from __future__ import annotations

import copy

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import nvfp4
from weights import (
    COLUMNS,
    IMPORTANCES,
    INT4,
    SCALES,
    arguments,
    blocks_of,
    build,
    error,
    gathered,
    inputs,
    layer,
    normalized,
    quadratic,
)

from calipers.errors import NoStatisticsError, TensorValueError
from calipers.observers import Observer
from calipers.statistics.sums import shrunk


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize("args", [INT4, arguments("channel", "fp8"), nvfp4(16)], ids=str)
def test_report(args: QuantizationArgs, importance: str, dtype: torch.dtype) -> None:
    linear, x = layer(dtype=dtype), inputs().to(dtype)
    observer = gathered(linear, x, args, importance=importance)(linear.weight)
    hessian = shrunk(blocks_of(x, COLUMNS), len(x))
    found = []
    for name in ("memoryless_minmax", "memoryless_mse"):
        other = Observer.load_from_registry(name, base_name="weight", args=args)
        found.append(other(linear.weight).get_qparams())
    found.append(observer.get_qparams())
    if importance == "hessian":
        expected = [quadratic(linear.weight, qparams, args, hessian) for qparams in found]
    else:
        weights = normalized(x) if importance == "imatrix" else None
        expected = [error(linear.weight, qparams, args, weights) for qparams in found]
    report = observer.report()
    assert list(report) == pytest.approx(expected, rel=1e-4)
    assert report.chosen <= min(report.minmax, report.mse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("importance", IMPORTANCES)
@pytest.mark.parametrize(
    "args", [INT4, arguments("channel", "int4_asym"), arguments("block", "fp8"), nvfp4(16)], ids=str
)
def test_how_large_weights_are_does_not_matter(
    args: QuantizationArgs, importance: str, dtype: torch.dtype
) -> None:
    """Their squares are beyond float32; powers of two change no digit."""
    linear = layer(dtype=dtype)
    inputs_seen = gathered(linear, inputs(), args, importance=importance)
    plain = copy.deepcopy(inputs_seen)(linear.weight)
    for factor in (2.0**100, 2.0**-80):
        observer = copy.deepcopy(inputs_seen)(linear.weight * factor)
        expected = [each * factor**2 for each in plain.report()]
        assert list(observer.report()) == pytest.approx(expected, rel=1e-12)
        ours, theirs = observer.get_qparams(), plain.get_qparams()
        assert torch.equal(ours["zero_point"].float(), theirs["zero_point"].float())
        scale = ours["scale"].double()
        if ours["global_scale"] is not None:
            scale = scale / ours["global_scale"].double()
            theirs["scale"] = theirs["scale"].double() / theirs["global_scale"].double()
        assert torch.equal(scale, theirs["scale"].double() * factor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("importance", IMPORTANCES)
def test_what_leaves_its_dtype_is_an_infinite_error(importance: str, dtype: torch.dtype) -> None:
    """Under min-max, −1.5 scales become −2."""
    linear = layer(dtype=dtype)
    args = QuantizationArgs(num_bits=2, group_size=16)
    observer = gathered(linear, inputs(), args, importance=importance)
    linear.weight[0, 0] = -65472.0 if dtype == torch.float16 else torch.finfo(dtype).min
    report = observer(linear.weight).report()
    assert report.minmax == torch.inf
    assert 0 < report.chosen < torch.inf


def test_what_happens_to_the_weight_afterwards_changes_nothing() -> None:
    for args in (INT4, nvfp4(16)):
        linear = layer()
        observer = build(args)(linear.weight)
        before = observer.get_qparams()
        linear.weight.fill_(9)
        after = observer.get_qparams()
        assert torch.equal(before["scale"].float(), after["scale"].float())


def test_observing_twice_is_observing_the_last() -> None:
    first, second = layer().weight, layer().weight * 3
    observer = build()(first)(second)
    assert torch.equal(observer.get_qparams()["scale"], build()(second).get_qparams()["scale"])
    observer.reset()
    with pytest.raises(NoStatisticsError, match="no longer has the weight it observed"):
        observer.report()
    assert torch.equal(
        observer(first).get_qparams()["scale"], build()(first).get_qparams()["scale"]
    )


def test_nonfinite_values_are_refused() -> None:
    weight = layer().weight
    weight[0, 3] = torch.nan
    observer = build()
    with pytest.raises(TensorValueError, match="was given 1 non-finite value"):
        observer(weight)
    assert not observer.fields()


@pytest.mark.parametrize("args", [INT4, arguments("channel", "int4_asym"), nvfp4(16)], ids=str)
def test_nonfinite_values_can_be_left_out(args: QuantizationArgs) -> None:
    weight = layer().weight
    weight[0, 3] = weight[2, 40] = 0
    expected = build(args)(weight).get_qparams()
    weight[0, 3], weight[2, 40] = torch.nan, -torch.inf
    found = build(args, nonfinite="ignore")(weight).get_qparams()
    assert torch.equal(found["scale"].float(), expected["scale"].float())


@pytest.mark.parametrize("args", [INT4, nvfp4(16), SCALES["mxfp4"]], ids=str)
def test_float64(args: QuantizationArgs) -> None:
    weight = layer(dtype=torch.float64).weight
    qparams = build(args)(weight).get_qparams()
    other = Observer.load_from_registry("memoryless_mse", base_name="weight", args=args)
    assert error(weight, qparams, args) <= error(weight, other(weight).get_qparams(), args)
