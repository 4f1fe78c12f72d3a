"""What can happen to an observer between its hooks, its weight and its results."""

from __future__ import annotations

import copy

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import nvfp4
from torch import Tensor

from calipers.errors import NoStatisticsError
from calipers.observers import Observer

INT8 = QuantizationArgs(num_bits=8, strategy="channel")
INT4 = QuantizationArgs(num_bits=4, group_size=32)


def build(args: QuantizationArgs = INT4, name: str = "optimal", **options: object) -> Observer:
    return Observer.load_from_registry(name, base_name="weight", args=args, **options)


def plain(args: QuantizationArgs, weight: Tensor) -> dict[str, Tensor | None]:
    return build(args, importance="none")(weight).get_qparams()


def test_the_smallest_floats_do_not_take_the_scale_of_others() -> None:
    weight = torch.zeros(4, 32)
    weight[0] = torch.randn(32)
    weight[1:] = 1.4e-45 * torch.randint(1, 20, (3, 32))
    scale = plain(INT8, weight)["scale"]
    assert bool((scale[1:] < 1e-40).all())
    assert bool((scale > 0).all())


def test_group_size_of_minus_one_is_a_channel() -> None:
    args = QuantizationArgs(num_bits=4, group_size=-1)
    observer, linear = build(args, importance="hessian"), torch.nn.Linear(64, 16)
    observer.attach(linear)
    linear(torch.randn(8, 64))
    assert observer._hessian_sum.shape == (1, 64, 64)


def test_the_next_weight_has_a_solution_of_its_own() -> None:
    weight = torch.randn(8, 64)
    scale = build(importance="none")(weight)(weight * 4).get_qparams()["scale"]
    assert torch.equal(scale, 4 * plain(INT4, weight)["scale"])


def test_what_is_fused_leaves_no_older_result_behind() -> None:
    weight = torch.randn(8, 64)
    observer, other = (build(nvfp4(16), importance="none") for _ in range(2))
    observer(weight)
    Observer.fuse([observer, other])
    observer(weight * 50)
    loaded = build(nvfp4(16), importance="none")
    loaded.load_state_dict(observer.state_dict())
    with pytest.raises(NoStatisticsError, match="no longer has the weight it observed"):
        loaded.get_qparams()


def test_fusing_without_a_global_scale_changes_nothing() -> None:
    weight = torch.randn(8, 64)
    observer, other = (build(importance="none") for _ in range(2))
    Observer.fuse([observer, other])
    observer(weight)
    loaded = build(importance="none")
    Observer.fuse([loaded, other])
    loaded.load_state_dict(observer.state_dict())
    assert torch.equal(loaded.get_qparams()["scale"], plain(INT4, weight)["scale"])


def test_a_weight_that_was_changed_meanwhile() -> None:
    weight, sibling = torch.randn(8, 64), torch.randn(8, 64)
    observer, other = (build(nvfp4(16), importance="none") for _ in range(2))
    Observer.fuse([observer, other])
    observer(weight)
    other(sibling)
    weight.zero_()
    with pytest.raises(NoStatisticsError, match="since it was changed in place, the weight"):
        observer.get_qparams()


@pytest.mark.parametrize("name", ["optimal", "imatrix_mse"])
def test_reset_between_attach_and_detach(name: str) -> None:
    observer, linear = build(name=name), torch.nn.Linear(64, 16)
    observer.attach(linear)
    linear(torch.randn(4, 64))
    observer.reset()
    observer.detach(linear)
    assert not linear._forward_pre_hooks
    assert not hasattr(linear, "_imatrix_sum")


def test_a_copy_does_not_remove_the_hook_of_the_original() -> None:
    observer, linear = build(), torch.nn.Linear(64, 16)
    observer.attach(linear)
    copied = copy.deepcopy(observer)
    linear(torch.randn(4, 64))
    copied.detach(linear)
    assert int(linear._imatrix_count) == 4
    observer.detach(linear)
    assert not linear._forward_pre_hooks


@pytest.mark.parametrize("importance", ["imatrix", "hessian"])
def test_tokens_that_are_not_finite_are_left_out(importance: str) -> None:
    x = torch.randn(50, 64)
    spoilt = torch.cat([x, torch.full((1, 64), torch.nan)])
    found = []
    for data, nonfinite in ((x, "raise"), (spoilt, "ignore")):
        linear = torch.nn.Linear(64, 16)
        observer = build(importance=importance, strict=True, nonfinite=nonfinite)
        observer.attach(linear)
        linear(data)
        observer.detach(linear)
        torch.manual_seed(0)
        found.append(observer(torch.randn(16, 64)).get_qparams()["scale"])
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_any_default_dtype(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 64).bfloat16()
    expected = {name: build(INT4, name)(weight) for name in ("memoryless_mse", "mse")}
    torch.set_default_dtype(dtype)
    try:
        for name, observer in expected.items():
            ours = build(INT4, name)(weight).get_qparams()["scale"]
            assert torch.equal(ours, observer.get_qparams()["scale"])
        asymmetric = QuantizationArgs(num_bits=4, group_size=32, symmetric=False)
        for args in (INT4, asymmetric, nvfp4(16)):
            assert bool(torch.isfinite(plain(args, weight)["scale"].float()).all())
            assert bool(torch.isfinite(plain(args, weight.float())["scale"].float()).all())
    finally:
        torch.set_default_dtype(torch.float32)


def test_long_pieces_of_float32_are_polished() -> None:
    """Too long for every float to be looked at: no scale of 8 significant bits is better."""
    torch.manual_seed(0)
    weight = torch.randn(600, 500)
    scale = float(plain(QuantizationArgs(num_bits=4, strategy="tensor"), weight)["scale"])

    def error(scale: float) -> float:
        codes = torch.clamp(torch.round(weight.double() / scale), -8, 7)
        return float((codes * scale - weight).square().sum())

    nearby = [scale * (1 + i / 256) for i in range(-40, 41)]
    stored = [float(torch.tensor(s).bfloat16()) for s in nearby]
    assert error(scale) <= min(map(error, stored)) * (1 + 1e-9)
