"""Error feedback loses less than rounding to nearest, and nothing it adds loses more."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.feedback import Rounding
from calipers.numerics.formats import Format
from calipers.numerics.layout import Layout
from calipers.solvers.gptq import corrected, curvature, feed_back_errors, losses
from calipers.solvers.refit import Scales

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


def loss(x: Tensor, difference: Tensor, added: float = 0.0) -> Tensor:
    """Σ‖Δx‖² of each row over the tokens, in float64."""
    difference = difference.double()
    return (difference @ x.T).square().mean(1) + added * difference.square().sum(1)


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
    before = loss(x, rounding.nearest(weight) - weight, curve.added)
    total = before.sum()
    for sweeps in (0, 1, 4):
        values, same = feed_back_errors(weight, curve, rounding, block=16, sweeps=sweeps)
        assert same is rounding
        torch.testing.assert_close(rounding.nearest(values), values)
        now = loss(x, values - weight, curve.added)
        assert bool((now <= before * (1 + 1e-5)).all())
        assert now.sum() < total if sweeps == 0 else now.sum() <= total * (1 + 1e-5)
        before, total = now, now.sum()
    scales = Scales(None, Layout.of("weight", args).rows_per_scale(len(weight)))
    values, refitted = feed_back_errors(weight, curve, rounding, scales, block=16)
    torch.testing.assert_close(refitted.nearest(values), values)
    assert loss(x, values - weight, curve.added).sum() < total * (1 - 1e-3)


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
        found.append(loss(x, values - weight, curve.added))
    assert found[0].sum() < found[1].sum()
    assert bool((found[0] <= found[1] * (1 + 1e-5)).all())


def test_losses_are_what_the_outputs_lose() -> None:
    x, difference = inputs(), weight_of(seed=3)
    for by_activation in (False, True):
        curve = curvature(hessian_of(x), 0.02, by_activation)
        assert curve is not None
        expected = loss(x, difference, curve.added)
        torch.testing.assert_close(losses(difference, curve, block=20), expected, rtol=1e-5, atol=0)


def test_the_corrected_weight_is_the_least_squares_solution() -> None:
    x = inputs()
    y = x + 0.1 * torch.randn(x.shape, dtype=torch.float64)
    weight = weight_of()
    for by_activation in (False, True):
        curve = curvature(hessian_of(y), 0.03, by_activation)
        assert curve is not None
        # Damping towards W: as many more tokens on which nothing has changed.
        anchor = (len(x) * curve.added) ** 0.5 * torch.eye(48, dtype=torch.float64)
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
    curve = curvature(flat, 1e-30)
    assert curve is not None
    mean = float(flat.diagonal().mean())
    assert 1e-30 * mean < curve.added <= mean
    torch.testing.assert_close(
        curve.root @ curve.root.T, flat + curve.added * torch.eye(48), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_a_hessian_without_meaning_has_no_curvature(value: float) -> None:
    assert curvature(torch.full((4, 4), value, dtype=torch.float64), 0.01) is None


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
