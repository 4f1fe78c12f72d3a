"""Scales move to the lowest point of what their codes lose, among those that can be stored."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.hessian import Rounding
from calipers.numerics.formats import Format, storable_scales
from calipers.numerics.layout import Layout
from calipers.solvers.gptq import Scales, refit_scales

INT4 = Format.of(QuantizationArgs(num_bits=4))


def matrix(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hessian_of(columns: int) -> Tensor:
    x = matrix(5 * columns, columns, seed=1) @ matrix(columns, columns, seed=2)
    return x.T @ x / len(x)


def rounded(
    target: Tensor, scales: Tensor, groups: Tensor, fmt: Format = INT4, zeros: Tensor | None = None
) -> tuple[Tensor, Rounding]:
    rounding = Rounding(scales, zeros, groups, fmt)
    return rounding.nearest(target), rounding


def loss(difference: Tensor, hessian: Tensor) -> Tensor:
    difference = difference.double()
    return (difference @ hessian.double() * difference).sum(1)


def refitted(
    values: Tensor, target: Tensor, hessian: Tensor, rounding: Rounding, scales: Scales
) -> tuple[Tensor, Rounding]:
    pulls = (values - target) @ hessian
    found, moved = refit_scales(values, pulls, hessian, rounding, scales)
    torch.testing.assert_close(pulls, (found - target) @ hessian, rtol=1e-3, atol=1e-2)
    return found, moved


def by_hand(
    values: Tensor, target: Tensor, hessian: Tensor, scales: Tensor, groups: Tensor, rows: int
) -> Tensor:
    """Move one scale after the other in float64: by what the sum over its rows is least."""
    codes = (values / scales[:, groups]).double()
    found, h = scales.double().clone(), hessian.double()
    for group in range(scales.shape[1]):
        own = torch.where(groups == group, codes, 0)
        for start in range(0, len(values), rows):
            these = slice(start, start + rows)
            rest = codes[these] * found[these][:, groups] - target[these].double()
            rest -= own[these] * found[these, group, None]
            least = -(rest @ h * own[these]).sum() / (own[these] @ h * own[these]).sum()
            found[these, group] = least
    return found


@pytest.mark.parametrize("rows", [1, 4, 12])
def test_any_scale_becomes_the_one_of_least_squares(rows: int) -> None:
    target, hessian, groups = matrix(12, 40), hessian_of(40), torch.arange(40) // 8
    scales = target.abs().amax() / 7 * torch.ones(12, 5)
    values, rounding = rounded(target, scales, groups)
    found, moved = refitted(values, target, hessian, rounding, Scales(None, rows))
    expected = by_hand(values, target, hessian, scales, groups, rows)
    torch.testing.assert_close(moved.scales.double(), expected, rtol=1e-4, atol=1e-6)
    codes = (values / scales[:, groups]).round()
    assert torch.equal(found, codes * moved.scales[:, groups])
    assert loss(found - target, hessian).sum() < loss(values - target, hessian).sum()


def test_blocks_of_columns_see_what_those_before_have_become() -> None:
    target, hessian, groups = matrix(3, 512), hessian_of(512), torch.arange(512) // 64
    scales = target.reshape(3, 8, 64).abs().amax(-1) / 5
    values, rounding = rounded(target, scales, groups)
    _, moved = refitted(values, target, hessian, rounding, Scales(None, 1))
    expected = by_hand(values, target, hessian, scales, groups, 1)
    torch.testing.assert_close(moved.scales.double(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "args",
    [
        QuantizationArgs(num_bits=4, strategy="group", group_size=16, symmetric=False),
        QuantizationArgs(num_bits=8, type="float", strategy="channel"),
        QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=16),
    ],
    ids=str,
)
def test_what_is_stored_loses_less_and_is_storable(args: QuantizationArgs) -> None:
    target, hessian, fmt = matrix(20, 48), hessian_of(48), Format.of(args)
    layout = Layout.of("weight", args)
    storable = storable_scales(fmt, torch.bfloat16)
    pieces = layout.pieces(target)
    first = pieces.abs().amax((0, -2, -1)).div(fmt.limits[1]).bfloat16().float()
    zeros = None if fmt.symmetric else torch.ones_like(first)
    values, rounding = rounded(target, first, layout.groups(48), fmt, zeros)
    found, moved = refitted(values, target, hessian, rounding, Scales(storable, 1))
    assert torch.equal(moved.scales.bfloat16().float(), moved.scales)
    assert not torch.equal(moved.scales, first)
    now, before = loss(found - target, hessian), loss(values - target, hessian)
    assert bool((now <= before * (1 + 1e-6)).all())
    assert now.sum() < before.sum()
    torch.testing.assert_close(moved.nearest(found), found)


def test_negative_scales_stay_negative_and_codes_of_zero_keep_theirs() -> None:
    target, hessian = matrix(6, 16), hessian_of(16)
    target[0] = 0.0
    scales = -target.abs().amax(1, keepdim=True).clamp(min=0.1) / 8
    values, rounding = rounded(target, scales, torch.zeros(16, dtype=torch.int64))
    _, moved = refitted(values, target, hessian, rounding, Scales(None, 1))
    assert bool((moved.scales < 0).all())
    assert moved.scales[0] == scales[0]
    assert not torch.equal(moved.scales, scales)


def test_a_scale_that_would_change_its_sign_stays() -> None:
    target, hessian = matrix(6, 16), hessian_of(16)
    scales = target.abs().amax(1, keepdim=True) / 7
    values, rounding = rounded(-target, scales, torch.zeros(16, dtype=torch.int64))
    found, moved = refitted(values, target, hessian, rounding, Scales(None, 1))
    assert torch.equal(moved.scales, scales)
    assert torch.equal(found, values)


def test_the_nearest_storable_scale_is_taken_with_its_sign() -> None:
    scales = Scales(torch.tensor([0.5, 1.0, 2.0]), 1)
    wanted = torch.tensor([0.1, 0.7, -0.8, 1.4, -1.6, 9.0])
    assert scales.nearest(wanted).tolist() == [0.5, 0.5, -1.0, 1.0, -2.0, 2.0]
