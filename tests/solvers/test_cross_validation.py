"""What is chosen by folds of the data loses less on each when it was found on the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.hessian import Rounding
from calipers.numerics.formats import Format
from calipers.numerics.layout import Layout
from calipers.solvers.cross_validation import Problem, choose, held_out_loss, lowest
from calipers.solvers.gptq import (
    Curvature,
    Moments,
    Regularization,
    corrected,
    curvature,
    feed_back_errors,
)

ARGS = QuantizationArgs(num_bits=3, strategy="group", group_size=16)
ROWS, COLUMNS = 12, 48


class Seen(NamedTuple):
    """Tokens as they were, as they have become, and what is lost beside them."""

    before: Tensor
    now: Tensor
    lost: Tensor


def tokens(count: int, seed: int, noise: float = 0.3) -> Seen:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(COLUMNS, COLUMNS, generator=torch.Generator().manual_seed(7))
    before, change = (torch.randn(count, COLUMNS, generator=generator) for _ in range(2))
    before = before @ (mixing * torch.logspace(-1, 0.5, COLUMNS))
    lost = torch.randn(count, ROWS, generator=generator)
    return Seen(before.double(), (before + noise * change).double(), lost.double())


def moments_of(seen: Seen, streams: int = 2) -> Moments:
    hessian = seen.now.T @ seen.now
    if streams == 1:
        return Moments(hessian, len(seen.now))
    return Moments(hessian, len(seen.now), seen.before.T @ seen.now, seen.lost.T @ seen.now)


def weight_of(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def rounded(targets: Sequence[Tensor], _: Moments, curve: Curvature) -> list[Tensor]:
    """Feed errors back under scales by the largest value."""
    layout, fmt, found = Layout.of("weight", ARGS), Format.of(ARGS), []
    for target in targets:
        scale = layout.pieces(target).abs().amax((0, -2, -1)) / fmt.limits[1]
        by_rows = layout.by_rows(scale, len(target))
        rounding = Rounding(by_rows, None, layout.groups(COLUMNS), fmt)
        found.append(feed_back_errors(target, curve, rounding)[0])
    return found


def lost_on_folds(
    weight: Tensor, folds: Sequence[Seen], streams: int, how: Regularization
) -> float:
    """The whole way from tokens, in another order of arithmetic: error by error."""
    total = 0.0
    for fold in folds:
        rest = [other for other in folds if other is not fold]
        others = Seen(*(torch.cat(each) for each in zip(*rest, strict=True)))
        seen, target = moments_of(others, streams), weight
        mean = seen.mean_hessian()
        if streams == 2:
            by = curvature(mean, how.correction)
            assert by is not None
            target = corrected(weight, *seen.mean_crosses(), by)
        curve = curvature(mean, how.damping)
        assert curve is not None
        (values,) = rounded([target], seen, curve)
        total += brute_force(weight, values, fold, streams)
    return total


def brute_force(weight: Tensor, values: Tensor, seen: Seen, streams: int) -> float:
    """Σ‖W x + d − Ŵ y‖² − Σ‖W x + d‖²; with one stream, x is y."""
    meant = seen.now @ weight.double().T
    if streams == 2:
        meant = seen.before @ weight.double().T + seen.lost
    given = seen.now @ values.double().T
    return float((meant - given).square().sum() - meant.square().sum())


@pytest.mark.parametrize("streams", [1, 2])
def test_the_loss_is_that_of_every_token(streams: int) -> None:
    weight, seen = weight_of(), tokens(300, 3)
    for values in (weight, weight.round(), weight_of(2).bfloat16()):
        found = held_out_loss(weight, values, moments_of(seen, streams))
        expected = brute_force(weight, values, seen, streams)
        assert found == pytest.approx(expected, rel=1e-11)


@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("sizes", [(400, 400), (60, 500), (90, 120, 150, 30)])
@pytest.mark.parametrize("noise", [0.01, 3.0])
def test_no_choice_is_worse_than_constants(
    streams: int, sizes: tuple[int, ...], noise: float
) -> None:
    weights = [weight_of(seed) for seed in (1, 2)]
    folds = [tokens(size, 10 + size, noise) for size in sizes]
    moments = [moments_of(fold, streams) for fold in folds]
    together = choose([Problem([weight], rounded) for weight in weights], moments)
    for weight, chosen in zip(weights, together, strict=True):
        assert chosen is not None
        assert [chosen] == choose([Problem([weight], rounded)], moments, Moments.sum_of(moments))
        lost = [lost_on_folds(weight, folds, streams, how) for how in (chosen, Regularization())]
        assert lost[0] <= lost[1] + 1e-6 * abs(lost[1])


def test_what_noise_says_is_trusted_less() -> None:
    found = []
    for count in (60, 20_000):
        folds = [moments_of(tokens(count, seed)) for seed in (1, 2)]
        (chosen,) = choose([Problem([weight_of()], rounded)], folds)
        assert chosen is not None
        found.append(chosen.correction)
    assert found[0] > found[1]


def test_nothing_is_chosen_where_nothing_can_be_factorised() -> None:
    nothing = torch.zeros(COLUMNS, COLUMNS, dtype=torch.float64)
    folds = [Moments(nothing, 5), Moments(nothing, 7)]
    assert choose([Problem([weight_of()], rounded)], folds) == [None]


def test_candidates_that_are_not_needed_are_not_worked_out() -> None:
    asked: list[tuple[float, list[int]]] = []

    def losses(candidate: float, which: Sequence[int]) -> list[float]:
        asked.append((candidate, list(which)))
        return [abs(candidate - goal) for goal in ([3, 1][i] for i in which)]

    assert lowest(2, (0, 1, 2, 3, 4, 5), 3, losses) == [3, 1]
    assert asked == [(2, [0, 1]), (3, [0, 1]), (4, [0, 1]), (1, [1]), (0, [1])]
