"""The parameters that are handed out are the best of all that can be stored."""

from __future__ import annotations

import brute
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DTYPES, EIGHTEEN, draw, nvfp4
from pairwise import pairwise
from weights import (
    COLUMNS,
    CUTS,
    SCALES,
    arguments,
    build,
    error,
    gathered,
    inputs,
    layer,
    least_error,
    local_scales,
    normalized,
)

from calipers.errors import (
    ConfigurationError,
)
from calipers.observers import Observer

# The result


@pytest.mark.parametrize(
    ("cut", "fmt", "dtype"),
    pairwise(
        [cut for cut in CUTS if cut != "tensor_group"],
        ["int2", "int3", "int4", "int4_asym", "int8", "fp8", "fp4"],
        [torch.bfloat16, torch.float16],
    ),
)
def test_no_storable_scale_is_better(cut: str, fmt: str, dtype: torch.dtype) -> None:
    args, weight = arguments(cut, fmt), layer(3, dtype=dtype).weight
    qparams = build(args)(weight).get_qparams()
    assert error(weight, qparams, args) <= least_error(weight, args) * (1 + 1e-6)


@pytest.mark.parametrize("importance", ["none", "imatrix"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_eighteen_distributions(dtype: torch.dtype, importance: str) -> None:
    linear = layer(len(EIGHTEEN), 32, dtype)
    linear.weight.data = torch.stack([draw(kind, (32,), dtype) for kind in EIGHTEEN])
    x = inputs(100, 32).to(dtype)
    args = QuantizationArgs(num_bits=4, strategy="channel")
    qparams = gathered(linear, x, args, importance=importance)(linear.weight).get_qparams()
    weights = normalized(x) if importance == "imatrix" else None
    for row, kind in enumerate(EIGHTEEN):
        mine = {
            name: part if part is None else part[row : row + 1] for name, part in qparams.items()
        }
        weight = linear.weight[row : row + 1]
        assert torch.isfinite(mine["scale"]).all()
        found, best = error(weight, mine, args, weights), least_error(weight, args, None, weights)
        assert found <= best * (1 + 1e-6), kind


@pytest.mark.parametrize(
    ("cut", "fmt", "dtype"),
    pairwise(list(CUTS), ["int4", "int4_asym", "int8_asym", "fp8", "fp8_asym", "fp4"], DTYPES),
)
def test_is_stored_as_min_max_is_and_errs_less_than_any(
    cut: str, fmt: str, dtype: torch.dtype
) -> None:
    args, linear = arguments(cut, fmt), layer(5, dtype=dtype)
    qparams = build(args)(linear.weight).get_qparams()
    found = error(linear.weight, qparams, args)
    for name in ("memoryless_minmax", "memoryless_mse", "nvfp4_expanded_mse"):
        other = Observer.load_from_registry(name, base_name="weight", args=args)(linear.weight)
        theirs = other.get_qparams()
        for key in ("scale", "zero_point"):
            assert qparams[key].dtype == theirs[key].dtype
            assert qparams[key].shape == theirs[key].shape
        assert (qparams["global_scale"] is None) == (theirs["global_scale"] is None)
        assert found <= error(linear.weight, theirs, args) * (1 + 1e-6), name


@pytest.mark.parametrize(
    ("cut", "fmt", "dtype"),
    pairwise(["channel", "group"], ["int4", "int4_asym", "fp8"], DTYPES),
)
def test_errs_less_than_a_classic_search_under_the_same_importance(
    cut: str, fmt: str, dtype: torch.dtype
) -> None:
    args, linear, x = arguments(cut, fmt), layer(5, dtype=dtype), inputs().to(dtype)
    found = gathered(linear, x, args, importance="imatrix")(linear.weight).get_qparams()
    classic = Observer.load_from_registry("imatrix_mse", base_name="weight", args=args, norm=2.0)
    classic.attach(linear)  # picks up the sums
    theirs = classic(linear.weight).get_qparams()
    weights = normalized(x)
    limit = error(linear.weight, theirs, args, weights) * (1 + 1e-6)
    assert error(linear.weight, found, args, weights) <= limit


@pytest.mark.parametrize("cut", ["tensor", "channel", "group", "block"])
def test_importance_is_minimized(cut: str) -> None:
    args, linear, x = arguments(cut, "int3"), layer(3), inputs().bfloat16()
    weights = normalized(x)
    found = gathered(linear, x, args, importance="imatrix")(linear.weight).get_qparams()
    best = least_error(linear.weight, args, None, weights)
    assert error(linear.weight, found, args, weights) <= best * (1 + 1e-5)
    plain = build(args)(linear.weight).get_qparams()
    assert error(linear.weight, plain, args, weights) > best * (1 + 1e-3)


def test_importance_follows_g_idx() -> None:
    linear, x = layer(), inputs().bfloat16()
    g_idx = torch.arange(COLUMNS) % 4
    order = torch.argsort(g_idx, stable=True)
    shuffled = gathered(linear, x, importance="imatrix")(linear.weight, g_idx=g_idx)
    del linear._imatrix_sum, linear._imatrix_count
    in_order = gathered(linear, x[:, order], importance="imatrix")(linear.weight[:, order])
    assert torch.equal(shuffled.get_qparams()["scale"], in_order.get_qparams()["scale"])


# Signed scales


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_signed_scales(bits: int, dtype: torch.dtype) -> None:
    args = QuantizationArgs(num_bits=bits, group_size=16)
    weight = layer(8, dtype=dtype).weight
    signed, plain = build(args, signed_scale=True)(weight), build(args)(weight)
    scale = signed.get_qparams()["scale"]
    assert bool((scale < 0).any())
    assert bool((scale > 0).any())
    assert bool((plain.get_qparams()["scale"] > 0).all())
    found = error(weight, signed.get_qparams(), args)
    assert found < error(weight, plain.get_qparams(), args)
    if dtype == torch.bfloat16:
        assert found <= least_error(weight, args, signed=True) * (1 + 1e-6)


@pytest.mark.parametrize("fmt", ["int4_asym", "fp8", "fp4"])
def test_signed_scales_are_for_symmetric_int(fmt: str) -> None:
    with pytest.raises(ConfigurationError, match="signed_scale is for symmetric int formats"):
        build(arguments("group", fmt), signed_scale=True)


# Scales of their own kind


@pytest.mark.parametrize("importance", ["none", "imatrix"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4(dtype: torch.dtype, importance: str) -> None:
    args, linear, x = nvfp4(16), layer(6, dtype=dtype), inputs().to(dtype)
    weights = normalized(x) if importance == "imatrix" else None
    observer = gathered(linear, x, args, importance=importance)(linear.weight)
    qparams = observer.get_qparams()
    assert torch.equal(qparams["scale"].to(brute.FP8).float(), qparams["scale"].float())
    usual = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    usual_scale = usual(linear.weight).get_qparams()["global_scale"]
    best = {
        scale: least_error(linear.weight, args, local_scales(scale), weights)
        for scale in (usual_scale, qparams["global_scale"])
    }
    found = error(linear.weight, qparams, args, weights)
    assert found <= best[qparams["global_scale"]] * (1 + 1e-5)
    assert found <= best[usual_scale] * (1 + 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_scales_under_a_global_scale(dtype: torch.dtype) -> None:
    """Without scale_dtype, a module stores them in the dtype of its weight."""
    args, weight = arguments("tensor_group", "int4"), layer(3, dtype=dtype).weight
    qparams = build(args)(weight).get_qparams()
    assert qparams["scale"].dtype == torch.float32
    assert torch.equal(qparams["scale"].to(dtype).float(), qparams["scale"])
    scales = torch.linspace(0.001, 0.5, 20_000, dtype=torch.float64)
    if dtype != torch.float32:
        stored = brute.floats_of(dtype) / qparams["global_scale"].double()
        scales = brute.around(stored, weight)
    assert error(weight, qparams, args) <= least_error(weight, args, scales) * (1 + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_dtype_of_its_own(dtype: torch.dtype) -> None:
    args = QuantizationArgs(num_bits=4, group_size=16, scale_dtype=torch.bfloat16)
    weight = layer(3, dtype=dtype).weight
    qparams = build(args)(weight).get_qparams()
    assert torch.equal(qparams["scale"].bfloat16().float(), qparams["scale"].float())
    best = least_error(weight, args, brute.around(brute.floats_of(torch.bfloat16), weight))
    assert error(weight, qparams, args) <= best * (1 + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_powers_of_two(fmt: str, dtype: torch.dtype) -> None:
    args, weight = SCALES[fmt], layer(6, dtype=dtype).weight
    qparams = build(args)(weight).get_qparams()
    minmax = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    assert qparams["scale"].dtype == minmax(weight).get_qparams()["scale"].dtype
    assert torch.equal(qparams["scale"].log2(), qparams["scale"].log2().round())
    powers = torch.arange(-24, 16, dtype=torch.float64).exp2()
    assert error(weight, qparams, args) <= least_error(weight, args, powers) * (1 + 1e-6)
