"""The parameters that are handed out are the best of all that can be stored."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import brute
import pytest
import reference
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from data import DTYPES, EIGHTEEN, FORMATS, draw, nvfp4
from torch import Tensor

from calipers.errors import (
    CalipersWarning,
    ConfigurationError,
    ImportanceError,
    NonFiniteError,
    WeightGoneError,
)
from calipers.observers import Observer, fuse_weight_observers
from calipers.statistics.hessian import shrunk

COLUMNS = 64
CUTS: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": {"strategy": "group", "group_size": 16},
    "tensor_group": {"strategy": "tensor_group", "group_size": 16},
    "block": {"strategy": "block", "block_structure": [2, 24]},  # two of them are cut off
}
INT4 = QuantizationArgs(num_bits=4, group_size=16)
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
SCALES = {
    "nvfp4": nvfp4(16),
    "mxfp4": QuantizationArgs(num_bits=4, **MX),
    "mxfp8": QuantizationArgs(num_bits=8, **MX),
}
IMPORTANCES = ("none", "imatrix", "hessian")


def build(args: QuantizationArgs = INT4, importance: str = "none", **options: Any) -> Observer:
    return Observer.load_from_registry(
        "optimal", base_name="weight", args=args, importance=importance, **options
    )


def inputs(tokens: int = 200, columns: int = COLUMNS) -> Tensor:
    mix = torch.eye(columns) + 0.5 * torch.randn(columns, columns) / columns**0.5
    return torch.randn(tokens, columns) * torch.logspace(-1.5, 0.7, columns) @ mix


def layer(rows: int = 4, columns: int = COLUMNS, dtype: torch.dtype = torch.bfloat16) -> Any:
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = torch.randn(rows, columns) * 0.3
    return linear.requires_grad_(False).to(dtype)


def gathered(linear: Any, x: Tensor, args: QuantizationArgs = INT4, **options: Any) -> Observer:
    observer = build(args, **options)
    observer.attach(linear)
    linear(x.to(linear.weight.dtype))
    observer.detach(linear)
    return observer


def rounded(
    weight: Tensor, qparams: Any, args: QuantizationArgs, dtype: torch.dtype = torch.float64
) -> Tensor:
    """What compressed-tensors makes of a weight."""
    parts = [qparams[name].to(dtype) for name in ("scale", "zero_point")]
    global_scale = qparams["global_scale"]
    global_scale = None if global_scale is None else global_scale.to(dtype)
    return fake_quantize(weight.detach().to(dtype), *parts, args, global_scale)


def error(
    weight: Tensor, qparams: Any, args: QuantizationArgs, importance: Tensor | None = None
) -> float:
    difference = rounded(weight, qparams, args) - weight.detach().double()
    return float((difference.square() * (1 if importance is None else importance)).sum())


def normalized(x: Tensor) -> Tensor:
    """E[x²] over its mean."""
    squares = x.double().square().mean(0)
    return squares / squares.mean()


def least_error(
    weight: Tensor,
    args: QuantizationArgs,
    scales: Tensor | None = None,
    importance: Tensor | None = None,
    signed: bool = False,
) -> float:
    """The sum over all pieces of the least error that any storable scale gives."""
    weight = weight.detach()
    weights = torch.ones(weight.shape, dtype=torch.float64)
    weights = weights if importance is None else weights * importance
    cut, of_cut = (reference.pieces(part, "weight", args) for part in (weight, weights))
    total = 0.0
    for home, values in cut.items():
        storable = brute.floats_of(weight.dtype) if scales is None else scales
        storable = brute.around(storable, values) if scales is None else storable
        if values.any():
            errors = brute.all_errors(values, storable, args, 2.0, of_cut[home], signed)
            total += float(errors.min())
    return total


def arguments(cut: str, fmt: str) -> QuantizationArgs:
    return QuantizationArgs(**FORMATS[fmt], **CUTS[cut])


# The result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fmt", ["int2", "int3", "int4", "int4_asym", "int8", "fp8", "fp4"])
@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "tensor_group"])
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", ["int4", "int4_asym", "int8_asym", "fp8", "fp8_asym", "fp4"])
@pytest.mark.parametrize("cut", CUTS)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", ["channel", "group"])
@pytest.mark.parametrize("fmt", ["int4", "int4_asym", "fp8"])
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


# Hessians


def quadratic(weight: Tensor, qparams: Any, args: QuantizationArgs, hessian: Tensor) -> float:
    """Σ Δᵀ H Δ over rows and blocks on the diagonal.

    Codes are those of float32, as they will be: at a tie, which float64 may see otherwise, both
    have the same distance, but not the same Δᵀ H Δ.
    """
    difference = rounded(weight, qparams, args, torch.float32) - weight.detach().double()
    width = hessian.shape[-1]
    blocks = difference.reshape(len(difference), -1, width)
    return float(torch.einsum("rbi,bij,rbj->", blocks, hessian, blocks))


def blocks_of(x: Tensor, width: int) -> Tensor:
    whole = x.double().T @ x.double() / len(x)
    blocks = [whole[i : i + width, i : i + width] for i in range(0, len(whole), width)]
    return torch.stack(blocks) / whole.diagonal().mean()


@pytest.mark.parametrize("fmt", ["int3", "int4_asym", "fp4"])
@pytest.mark.parametrize(("cut", "width"), [("channel", 64), ("group", 64), ("block", 8)])
def test_the_hessian_judges(cut: str, width: int, fmt: str) -> None:
    args, linear, x = arguments(cut, fmt), layer(6), inputs(1000).bfloat16()
    hessian = shrunk(blocks_of(x, width), len(x))
    found = {}
    for importance in IMPORTANCES:
        observer = gathered(linear, x, args, importance=importance)(linear.weight)
        found[importance] = quadratic(linear.weight, observer.get_qparams(), args, hessian)
    assert found["hessian"] <= found["imatrix"] * (1 + 1e-5)
    assert found["hessian"] < found["none"]


def test_with_a_long_shortlist_no_scale_is_better_by_the_hessian() -> None:
    args = QuantizationArgs(num_bits=3, strategy="channel")
    linear, x = layer(3, 16), inputs(1000, 16).bfloat16()
    hessian = shrunk(blocks_of(x, 16), len(x))
    observer = gathered(linear, x, args, importance="hessian", shortlist=256)(linear.weight)
    qparams = observer.get_qparams()
    scales = brute.floats_of(torch.bfloat16)
    for row in range(3):
        weight = linear.weight[row : row + 1]
        mine = {**qparams, "scale": qparams["scale"][row : row + 1]}
        mine["zero_point"] = qparams["zero_point"][row : row + 1]
        found = quadratic(weight, mine, args, hessian)
        each = [
            quadratic(weight, {**mine, "scale": scale.reshape(1, 1)}, args, hessian)
            for scale in brute.around(scales, weight, octaves=4)
        ]
        assert found <= min(each) * (1 + 1e-5)


def test_one_hessian_serves_every_group_size() -> None:
    linear, x = layer(), inputs().bfloat16()
    gathered(linear, x, QuantizationArgs(num_bits=4, group_size=32), importance="hessian")
    assert linear._hessian_sum.shape == (1, 64, 64)
    heir = build(importance="hessian", strict=True)
    heir.attach(linear)  # picks it up
    direct = gathered(layer(), x, importance="hessian")
    ours, theirs = heir(linear.weight), direct(linear.weight)
    torch.testing.assert_close(ours.get_qparams()["scale"], theirs.get_qparams()["scale"])


def test_hessians_of_another_width() -> None:
    linear = layer(columns=96)
    linear._hessian_sum = torch.eye(48).repeat(2, 1, 1).double()
    linear._hessian_count = torch.tensor(100)
    observer = build(QuantizationArgs(num_bits=4, group_size=32), "hessian", strict=True)
    observer.attach(linear)
    with pytest.raises(ImportanceError) as caught:
        observer(linear.weight)
    assert str(caught.value) == (
        "Observer 'optimal' (weight): the Hessian has blocks of 48 columns, which do not fit "
        "pieces of 32 columns. Gather it with this observer. "
        "With strict=False it would fall back to plain error."
    )


def test_g_idx_tears_a_hessian_apart() -> None:
    linear = layer()
    observer = gathered(linear, inputs(), importance="hessian", strict=True)
    with pytest.raises(ImportanceError, match="neighbouring columns, which g_idx tears apart"):
        observer(linear.weight, g_idx=torch.arange(COLUMNS) % 4)


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
def test_float32_scales_under_a_global_scale(dtype: torch.dtype) -> None:
    """Without scale_dtype, compressed-tensors stores them so, whatever the weight is."""
    args, weight = arguments("tensor_group", "int4"), layer(3, dtype=dtype).weight
    qparams = build(args)(weight).get_qparams()
    assert qparams["scale"].dtype == torch.float32
    scales = torch.linspace(0.001, 0.5, 20_000, dtype=torch.float64)
    assert error(weight, qparams, args) <= least_error(weight, args, scales) * (1 + 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_dtype_of_its_own(dtype: torch.dtype) -> None:
    args = QuantizationArgs(num_bits=4, group_size=16, scale_dtype=torch.bfloat16)
    weight = layer(3, dtype=dtype).weight
    qparams = build(args)(weight).get_qparams()
    assert torch.equal(qparams["scale"].bfloat16().float(), qparams["scale"].float())
    best = least_error(weight, args, brute.around(brute.floats_of(torch.bfloat16), weight))
    assert error(weight, qparams, args) <= best * (1 + 1e-6)


def local_scales(global_scale: Tensor) -> Tensor:
    return (brute.floats_of(brute.FP8).float() / global_scale).double()


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


class Attention(torch.nn.Module):
    def __init__(self, sizes: tuple[float, ...] = (0.1, 1.0, 3.0), **options: Any) -> None:
        super().__init__()
        for name, size in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True):
            linear = layer()
            linear.weight.data *= size
            linear.weight_observer = build(nvfp4(16), **options)
            setattr(self, name, linear)

    def observe(self) -> list[Any]:
        """All of them, before any is asked."""
        for linear in self.children():
            linear.weight_observer(linear.weight)
        return [linear.weight_observer.get_qparams() for linear in self.children()]


class TestFused:
    def test_they_share_the_best_of_their_global_scales(self) -> None:
        block = Attention()
        fuse_weight_observers(block)
        qparams = block.observe()
        shared = qparams[0]["global_scale"]
        assert all(torch.equal(mine["global_scale"], shared) for mine in qparams)
        weights = [linear.weight for linear in block.children()]
        absmax = torch.stack([weight.detach().float().abs().max() for weight in weights]).max()
        usual = (448 * 6 / absmax).reshape(1)
        totals = [
            sum(least_error(weight, nvfp4(16), local_scales(scale)) for weight in weights)
            for scale in (shared, usual)
        ]
        found = sum(
            error(weight, mine, nvfp4(16)) for weight, mine in zip(weights, qparams, strict=True)
        )
        assert found <= totals[0] * (1 + 1e-5)
        assert found <= totals[1] * (1 + 1e-2)  # the usual one may differ by a rounding to bf16

    def test_with_one_of_another_kind_the_usual_one_is_shared(self) -> None:
        block = Attention()
        block.k_proj.weight_observer = Observer.load_from_registry(
            "memoryless_minmax", base_name="weight", args=nvfp4(16)
        )
        fuse_weight_observers(block)
        scales = {float(qparams["global_scale"]) for qparams in block.observe()}
        assert len(scales) == 1

    def test_after_observing(self) -> None:
        before = Attention()
        after = copy.deepcopy(before)
        fuse_weight_observers(before)
        expected = before.observe()
        after.observe()
        fuse_weight_observers(after)
        for linear, theirs in zip(after.children(), expected, strict=True):
            ours = linear.weight_observer.get_qparams()
            assert torch.equal(ours["global_scale"], theirs["global_scale"])
            assert torch.equal(ours["scale"].float(), theirs["scale"].float())

    def test_loaded_from_a_state_the_weight_is_missing(self) -> None:
        block = Attention()
        block.observe()
        saved = block.state_dict()
        loaded = Attention()
        loaded.load_state_dict(saved)
        fuse_weight_observers(loaded)
        with pytest.raises(WeightGoneError) as caught:
            loaded.q_proj.weight_observer.get_qparams()
        assert str(caught.value) == (
            "Observer 'optimal' (weight of q_proj) no longer has the weight it observed, which a "
            "report and a global scale shared with fused observers need. "
            "Call observer(weight) again."
        )
        loaded.observe()
        fuse_weight_observers(block)
        block.observe()
        ours, theirs = (b.q_proj.weight_observer.get_qparams() for b in (loaded, block))
        assert torch.equal(ours["scale"].float(), theirs["scale"].float())


# How inputs are gathered

FIELDS = {
    "imatrix": ("_imatrix_sum", "_imatrix_count"),
    "hessian": ("_hessian_sum", "_hessian_count"),
}


@pytest.mark.parametrize("importance", FIELDS)
class TestHook:
    def test_sums_stay_on_the_module_for_the_next(self, importance: str) -> None:
        linear, x = layer(), inputs()
        first = gathered(linear, x, importance=importance)
        assert not linear._forward_pre_hooks
        for name in FIELDS[importance]:
            assert torch.equal(getattr(linear, name), getattr(first, name))
        second = build(importance=importance)
        second.attach(linear)
        assert not linear._forward_pre_hooks
        assert not any(hasattr(linear, name) for name in FIELDS[importance])
        ours, theirs = first(linear.weight), second(linear.weight)
        assert torch.equal(ours.get_qparams()["scale"], theirs.get_qparams()["scale"])

    def test_another_observer_may_gather_meanwhile(self, importance: str) -> None:
        linear, x = layer(), inputs()
        other = Observer.load_from_registry("imatrix_mse", base_name="weight", args=INT4)
        ours, same = build(importance=importance), build(importance=importance)
        for observer in (other, ours, same):
            observer.attach(linear)
        assert len(linear._forward_pre_hooks) == 3
        linear(x.bfloat16())
        for observer in (other, ours, same):
            observer.detach(linear)
        alone = gathered(layer(), x, importance=importance)
        for name in FIELDS[importance]:
            assert torch.equal(getattr(ours, name), getattr(alone, name))
            assert torch.equal(getattr(same, name), getattr(alone, name))
        assert int(other._imatrix_count) == len(x)
        assert not linear._forward_pre_hooks

    def test_two_jobs_merge_before_the_weight_is_observed(self, importance: str) -> None:
        linear, x = layer(), torch.randint(-3, 4, (60, COLUMNS)).float()  # sums are exact
        whole = gathered(linear, x, importance=importance)
        first = gathered(layer(), x[:20], importance=importance)
        first.merge(gathered(layer(), x[20:], importance=importance))
        for name in FIELDS[importance]:
            assert torch.equal(getattr(first, name), getattr(whole, name))
        ours, theirs = first(linear.weight), whole(linear.weight)
        assert torch.equal(ours.get_qparams()["scale"], theirs.get_qparams()["scale"])

    def test_state_dict_before_and_after_observing(self, importance: str) -> None:
        linear = layer()
        original = gathered(linear, inputs(), importance=importance)
        before, loaded = build(importance=importance), build(importance=importance)
        before.load_state_dict(original.state_dict())
        before(linear.weight)
        original(linear.weight)
        loaded.load_state_dict(original.state_dict())
        expected = original.get_qparams()["scale"]
        assert torch.equal(before.get_qparams()["scale"], expected)
        assert torch.equal(loaded.get_qparams()["scale"], expected)
        with pytest.raises(WeightGoneError, match=r"Call observer\(weight\) again"):
            loaded.report()
        again = loaded(linear.weight)  # the sums were saved with it
        assert torch.equal(again.get_qparams()["scale"], expected)

    def test_sums_take_no_part_in_gradients(self, importance: str) -> None:
        observer = gathered(layer(), inputs().requires_grad_(), importance=importance)
        assert not getattr(observer, FIELDS[importance][0]).requires_grad


def test_plain_error_needs_no_hook() -> None:
    linear = layer()
    build().attach(linear)
    assert not linear._forward_pre_hooks


class TestFallback:
    """Where importance cannot be used: plain error and one warning, or an error if strict."""

    @pytest.mark.parametrize(
        ("importance", "sums", "reason"),
        [
            ("imatrix", None, "no importance was gathered"),
            ("hessian", None, "no importance was gathered"),
            ("imatrix", torch.full((COLUMNS,), torch.nan), "importance has NaN or Inf in it"),
            ("imatrix", -torch.ones(COLUMNS), "importance has negative values"),
            ("imatrix", torch.zeros(COLUMNS), "importance is zero for every channel"),
            ("imatrix", torch.ones(63), "importance has 63 channels for 64 columns of the weight"),
            ("hessian", torch.ones(4, 16, 16) * torch.inf, "importance has NaN or Inf in it"),
            ("hessian", torch.ones(3, 16, 16), "importance has 48 channels for 64 columns of"),
            ("hessian", torch.zeros(4, 16, 16), "importance is zero for every channel"),
        ],
    )
    def test_importance_that_cannot_be_used(
        self, importance: str, sums: Tensor | None, reason: str
    ) -> None:
        def with_sums(**options: Any) -> Observer:
            observer = build(importance=importance, **options)
            if sums is not None:
                setattr(observer, FIELDS[importance][0], sums.double())
                setattr(observer, FIELDS[importance][1], torch.tensor(5))
            return observer

        weight = layer().weight
        with pytest.raises(ImportanceError, match=rf"^Observer 'optimal' \(weight\): {reason}"):
            with_sums(strict=True)(weight)
        observer = with_sums()
        with pytest.warns(CalipersWarning, match=reason) as caught:
            observer(weight)
        assert len(caught) == 1
        expected = build()(weight).get_qparams()["scale"]
        assert torch.equal(observer.get_qparams()["scale"], expected)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            observer(weight)  # said once

    def test_nan_off_the_diagonal(self) -> None:
        observer = build(importance="hessian", strict=True)
        observer._hessian_sum = torch.eye(16).repeat(4, 1, 1).double()
        observer._hessian_sum[1, 2, 3] = torch.nan
        observer._hessian_count = torch.tensor(5)
        with pytest.raises(ImportanceError, match="the Hessian has NaN or Inf in it"):
            observer(layer().weight)

    def test_unknown_importance(self) -> None:
        with pytest.raises(ConfigurationError) as caught:
            build(importance="awq")
        assert "'none', 'imatrix' or 'hessian'" in str(caught.value)
        assert "optimal" in str(caught.value)

    @pytest.mark.parametrize("shortlist", [0, 257])
    def test_shortlist(self, shortlist: int) -> None:
        with pytest.raises(ConfigurationError, match="shortlist"):
            build(shortlist=shortlist)

    def test_activations(self) -> None:
        with pytest.raises(ConfigurationError, match="use 'histogram_mse'"):
            Observer.load_from_registry("optimal", base_name="input", args=INT4)


# Little data, or none


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("importance", FIELDS)
@pytest.mark.parametrize(
    "args", [INT4, arguments("channel", "int4_asym"), nvfp4(16), SCALES["mxfp4"]], ids=str
)
class TestScarcity:
    def check(self, linear: Any, observer: Observer) -> None:
        """Scales are finite, and even what does not count is not ruined."""
        qparams = observer(linear.weight).get_qparams()
        assert bool(torch.isfinite(qparams["scale"].float()).all())
        assert bool((qparams["scale"].float() > 0).all())
        weight = linear.weight.double()
        difference = rounded(weight, qparams, observer.args) - weight
        assert float(difference.norm()) <= 0.5 * float(weight.norm())

    def test_idle_channels(self, args: QuantizationArgs, importance: str, dtype: Any) -> None:
        linear, x = layer(dtype=dtype), inputs()
        x[:, ::3] = 0
        self.check(linear, gathered(linear, x, args, importance=importance, strict=True))

    def test_idle_groups(self, args: QuantizationArgs, importance: str, dtype: Any) -> None:
        linear, x = layer(dtype=dtype), inputs()
        x[:, :32] = 0
        self.check(linear, gathered(linear, x, args, importance=importance, strict=True))

    def test_one_token(self, args: QuantizationArgs, importance: str, dtype: Any) -> None:
        linear = layer(dtype=dtype)
        observer = gathered(linear, inputs(1), args, importance=importance, strict=True)
        self.check(linear, observer)

    def test_zeros(self, args: QuantizationArgs, importance: str, dtype: Any) -> None:
        """They take what min-max gives them."""
        linear = layer(dtype=dtype)
        linear.weight[0] = 0
        linear.weight[1, :32] = 0
        observer = gathered(linear, inputs(), args, importance=importance, strict=True)
        self.check(linear, observer)
        linear.weight.zero_()
        ours = observer(linear.weight).get_qparams()
        minmax = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
        theirs = minmax(linear.weight).get_qparams()
        assert torch.equal(ours["scale"].float(), theirs["scale"].float())
        assert torch.equal(ours["zero_point"].float(), theirs["zero_point"].float())

    def test_denormals(self, args: QuantizationArgs, importance: str, dtype: Any) -> None:
        linear = layer(dtype=dtype)
        linear.weight.copy_(draw("denormals", (4, COLUMNS), dtype))
        qparams = gathered(linear, inputs(), args, importance=importance)(linear.weight)
        assert bool(torch.isfinite(qparams.get_qparams()["scale"].float()).all())
        assert bool((qparams.get_qparams()["scale"].float() > 0).all())


# Reports, and what an observer remembers


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
    with pytest.raises(WeightGoneError):
        observer.report()
    assert torch.equal(
        observer(first).get_qparams()["scale"], build()(first).get_qparams()["scale"]
    )


def test_nonfinite_values_are_refused() -> None:
    weight = layer().weight
    weight[0, 3] = torch.nan
    observer = build()
    with pytest.raises(NonFiniteError, match="was given 1 non-finite value"):
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
