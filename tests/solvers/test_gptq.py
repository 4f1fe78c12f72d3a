"""Error feedback loses less than rounding to nearest, and nothing it adds loses more."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.hessian import Rounding
from calipers.numerics.formats import Format
from calipers.numerics.layout import Layout
from calipers.solvers.gptq import Curvature, Scales, corrected, curvature, feed_back_errors, losses

GROUPED = QuantizationArgs(num_bits=4, strategy="group", group_size=16)


def inputs(tokens: int = 400, columns: int = 48, seed: int = 0) -> Tensor:
    """Activations whose channels go together, some of them far stronger than others."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    strength = torch.logspace(-1.5, 1, columns, dtype=torch.float64)
    noise = torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    return noise @ mixed * strength


def hessian_of(x: Tensor) -> Tensor:
    return x.T @ x / len(x)


def weight_of(rows: int = 24, columns: int = 48, seed: int = 1) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def rounding_of(weight: Tensor, args: QuantizationArgs) -> Rounding:
    layout, fmt = Layout.of("weight", args), Format.of(args)
    pieces = layout.pieces(weight)
    scale = pieces.abs().amax((0, -2, -1)) / fmt.limits[1]
    zeros = None if fmt.symmetric else layout.by_rows(torch.ones_like(scale), len(weight))
    groups = layout.groups(weight.shape[1])
    return Rounding(layout.by_rows(scale, len(weight)), zeros, groups, fmt)


def loss(x: Tensor, difference: Tensor, curve: Curvature) -> Tensor:
    """Σ‖Δx‖² of each row over the tokens, in float64, and what damping adds to it."""
    difference = difference.double()
    damping = added_to(curve) * difference.square().sum(1)
    return (difference @ x.T).square().mean(1) + damping


def added_to(curve: Curvature) -> float:
    return curve.added * curve.unit


@pytest.mark.parametrize(
    "args",
    [
        GROUPED,
        QuantizationArgs(num_bits=3, strategy="channel"),
        QuantizationArgs(num_bits=4, strategy="group", group_size=24, symmetric=False),
        QuantizationArgs(num_bits=8, type="float", strategy="tensor"),
        QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=16),
        QuantizationArgs(num_bits=4, strategy="block", block_structure=[16, 16]),
    ],
    ids=lambda args: f"{args.type}{args.num_bits} {args.strategy}",
)
@pytest.mark.parametrize("by_activation", [False, True])
def test_no_row_loses_more_than_by_rounding_to_nearest_and_no_sweep_adds_to_it(
    args: QuantizationArgs, by_activation: bool
) -> None:
    x, weight = inputs(), weight_of()
    curve = curvature(hessian_of(x), 0.01, by_activation)
    assert curve is not None
    rounding = rounding_of(weight, args)
    before = loss(x, rounding.nearest(weight) - weight, curve)
    total = before.sum()
    for sweeps in (0, 1, 4):
        values, same = feed_back_errors(weight, curve, rounding, block=16, sweeps=sweeps)
        assert same is rounding
        torch.testing.assert_close(rounding.nearest(values), values)
        now = loss(x, values - weight, curve)
        assert bool((now <= before * (1 + 1e-5)).all())
        assert now.sum() < total if sweeps == 0 else now.sum() <= total * (1 + 1e-5)
        before, total = now, now.sum()
    scales = Scales(None, Layout.of("weight", args).rows_per_scale(len(weight)))
    values, refitted = feed_back_errors(weight, curve, rounding, scales, block=16)
    torch.testing.assert_close(refitted.nearest(values), values)
    assert loss(x, values - weight, curve).sum() < total * (1 - 1e-3)


def test_scales_that_are_far_apart_take_turns_with_values(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs(columns=128), weight_of(64, 128)
    curve = curvature(hessian_of(x), 0.01)
    assert curve is not None
    storable = torch.arange(32, 64).outer(2.0 ** torch.arange(-12, -2)).flatten().unique()
    rounding = rounding_of(weight, GROUPED)
    rounding = rounding._replace(scales=Scales(storable, 1).nearest(rounding.scales))
    found = []
    for turns in (None, 1):
        if turns is not None:
            monkeypatch.setattr(Scales, "turns", turns)
        values, _ = feed_back_errors(weight, curve, rounding, Scales(storable, 1))
        found.append(loss(x, values - weight, curve))
    assert found[0].sum() < found[1].sum()
    assert bool((found[0] <= found[1] * (1 + 1e-5)).all())


def test_losses_are_what_the_outputs_lose() -> None:
    x, difference = inputs(), weight_of(seed=3)
    for by_activation in (False, True):
        curve = curvature(hessian_of(x), 0.02, by_activation)
        assert curve is not None
        expected = loss(x, difference, curve)
        found = losses(difference, curve, block=20) * curve.unit
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_the_corrected_weight_is_the_least_squares_solution() -> None:
    x = inputs()
    y = x + 0.1 * torch.randn(x.shape, dtype=torch.float64)
    weight = weight_of()
    for by_activation in (False, True):
        curve = curvature(hessian_of(y), 0.03, by_activation)
        assert curve is not None
        # Damping towards W: as many more tokens on which nothing has changed.
        anchor = (len(x) * added_to(curve)) ** 0.5 * torch.eye(48, dtype=torch.float64)
        wanted = torch.cat([x, anchor]) @ weight.double().T
        expected = torch.linalg.lstsq(torch.cat([y, anchor]), wanted).solution.T
        found = corrected(weight, x.T @ y / len(x), None, curve)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
        lost = torch.randn(len(x), len(weight), dtype=torch.float64) + y @ weight.double().T
        wanted[: len(x)] += lost
        expected = torch.linalg.lstsq(torch.cat([y, anchor]), wanted).solution.T
        found = corrected(weight, x.T @ y / len(x), lost.T @ y / len(x), curve)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_damping_grows_until_the_hessian_can_be_factorised() -> None:
    x = inputs(tokens=5)  # fewer than channels
    flat = hessian_of(x)
    mean = float(flat.diagonal().mean())
    for damping in (1e-30, 0.0):
        curve = curvature(flat, damping)
        assert curve is not None
        assert damping * mean < added_to(curve) <= mean
        found = curve.root @ curve.root.T * curve.unit
        expected = flat + added_to(curve) * torch.eye(48)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_a_hessian_without_meaning_has_no_curvature(value: float) -> None:
    assert curvature(torch.full((4, 4), value, dtype=torch.float64), 0.01) is None


@pytest.mark.parametrize("by_activation", [False, True])
def test_how_large_inputs_are_does_not_matter(by_activation: bool) -> None:
    """In a far greater range than float32 has, and to the bit for powers of two."""
    weight, rounding = weight_of(), rounding_of(weight_of(), GROUPED)
    x, residual = inputs(), weight_of(seed=3).double()
    hessian = hessian_of(x)
    cross = hessian + hessian.roll(1, 0) * 0.01
    damped = curvature(hessian, 0.01)
    assert damped is not None
    found = {}
    for factor in (1.0, 2.0, 2.0**-1, 2.0**120, 2.0**-135, 2.0**500, 2.0**-500, 1e36, 1e-40):
        curve = curvature(hessian * factor, 0.01, by_activation)
        assert curve is not None
        values, refitted = feed_back_errors(weight, curve, rounding, Scales(None, 1), block=16)
        meant = corrected(weight, cross * factor, residual * factor, curve)
        found[factor] = values, refitted.scales, meant
        if factor in (1e36, 1e-40):
            now, before = (loss(x, found[each][0] - weight, damped).sum() for each in (factor, 1.0))
            assert now == pytest.approx(float(before), rel=1e-3)
        else:
            assert all(map(torch.equal, found[factor], found[1.0])), factor


def test_dead_columns_are_rounded_to_nearest() -> None:
    x = inputs()
    x[:, [0, 7, 47]] = 0.0
    weight = weight_of()
    curve = curvature(hessian_of(x), 0.01)
    assert curve is not None
    rounding = rounding_of(weight, GROUPED)
    values, _ = feed_back_errors(weight, curve, rounding)
    nearest = rounding.nearest(weight)
    assert torch.equal(values[:, [0, 7, 47]], nearest[:, [0, 7, 47]])
    assert not torch.equal(values, nearest)
