"""How strongly error feedback is regularized, chosen by folds of the data.

A candidate is solved on all folds but one, and judged by what its output loses on that one; each
fold has its turn. What is judged on data that it was not found on tells how far it can be trusted.

Two numbers are chosen for each weight. What corrects it for changed inputs is a ridge regression
without any rounding, and is chosen as such: rounding adds an error of its own that hardly depends
on it (measured: the choice is that of the whole solve). By how much the Hessian is damped, under
which errors are fed back, is chosen with rounding.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from calipers.solvers.gptq import (
    CORRECTION_DAMPING,
    DAMPING,
    Curvature,
    Moments,
    Regularization,
    corrected,
    curvature,
)

DAMPINGS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
CORRECTIONS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_FIRST_DAMPING, _FIRST_CORRECTION = 3, 3  # which are tried first, with their neighbours
_LEAST_GAIN = 1e-7  # of what an output has, by which another candidate must be better


class Problem(NamedTuple):
    """Weights with the same input that are rounded together.

    :param weights: rows of them, as many as are to be judged
    :param rounded: rounds them: what is rounded in the place of each, what was seen of its inputs,
        and by what errors are weighed → what they are rounded to
    :param ordered: whether columns with the largest inputs are rounded first
    """

    weights: Sequence[Tensor]
    rounded: Callable[[Sequence[Tensor], Moments, Curvature], Sequence[Tensor]]
    ordered: bool = False


def choose(
    problems: Sequence[Problem], folds: Sequence[Moments], whole: Moments | None = None
) -> list[Regularization | None]:
    """Return what fits each problem best; None where nothing can be factorised.

    No choice is worse, on the folds, than the constants that are used without them.

    :param folds: what was seen of the inputs in each fold, two or more, none of them without tokens
    :param whole: the sum of all folds, where it is at hand
    """
    judge = _Judge(problems, folds, whole)
    corrections = [CORRECTION_DAMPING] * len(problems)
    if folds[0].cross is not None:
        corrections = lowest(
            len(problems), CORRECTIONS, _FIRST_CORRECTION, judge.losses_of_correction
        )
    targets = judge.targets(corrections)
    dampings = lowest(
        len(problems),
        DAMPINGS,
        _FIRST_DAMPING,
        lambda damping, which: judge.losses_of_damping(damping, which, targets),
    )
    constants = judge.targets([CORRECTION_DAMPING] * len(problems))
    chosen: list[Regularization | None] = []
    for index, best in enumerate(map(Regularization, dampings, corrections)):
        (found,) = judge.losses_of_damping(best.damping, [index], targets)
        (usual,) = judge.losses_of_damping(DAMPING, [index], constants)
        if min(found, usual) == math.inf:
            chosen.append(None)
        else:
            chosen.append(best if found <= usual else Regularization())
    return chosen


def held_out_loss(weight: Tensor, rounded: Tensor, seen: Moments) -> float:
    """Return what an output loses, summed over the tokens of a fold, but for a constant.

    Of Σ ‖W x + d − Ŵ y‖² that is tr(Ŵ H Ŵᵀ) − 2 tr((W C + D) Ŵᵀ), worked out in float64. The
    constant, Σ ‖W x + d‖², is the same for all Ŵ. Where there is one stream, C is H.
    """
    values = rounded.double()
    wanted = weight.double() @ (seen.hessian if seen.cross is None else seen.cross)
    if seen.residual is not None:
        wanted += seen.residual
    return float(((values @ seen.hessian - 2 * wanted) * values).sum())


def lowest(
    count: int,
    candidates: Sequence[float],
    first: int,
    losses: Callable[[float, Sequence[int]], Sequence[float]],
) -> list[float]:
    """Go down to the lowest candidate of each of several problems, from the same first one.

    Candidates are in order, and a problem goes on as long as a neighbour is lower. Problems that
    need a candidate at the same time are worked out together.

    :param losses: a candidate, and the numbers of problems → the loss of each

    >>> lowest(2, (1, 2, 3, 4, 5), 2, lambda value, which: [abs(value - 4 * i) for i in which])
    [1, 4]
    """
    known: list[dict[int, float]] = [{} for _ in range(count)]
    best = [first] * count
    left = list(range(count))
    while left:
        wanted: dict[int, list[int]] = defaultdict(list)
        for problem in left:
            for place in (best[problem], best[problem] - 1, best[problem] + 1):
                if 0 <= place < len(candidates) and place not in known[problem]:
                    wanted[place].append(problem)
        for place, which in sorted(wanted.items()):
            for problem, loss in zip(which, losses(candidates[place], which), strict=True):
                known[problem][place] = loss
        going_on = []
        for problem in left:
            mine, now = known[problem], best[problem]
            near = min((p for p in (now - 1, now + 1) if p in mine), key=mine.__getitem__)
            if mine[near] < mine[now] - _LEAST_GAIN:
                best[problem] = near
                going_on.append(problem)
        left = going_on
    return [candidates[place] for place in best]


class _Judge:
    """Works out what candidates lose on each fold when they were solved on the others.

    Losses are relative to what the weight gives at its output.
    """

    def __init__(
        self, problems: Sequence[Problem], folds: Sequence[Moments], whole: Moments | None
    ) -> None:
        self._problems, self._folds = problems, folds
        self._whole = Moments.sum_of(folds) if whole is None else whole
        hessian = self._whole.hessian
        self._energies = [
            [float(((w.double() @ hessian) * w.double()).sum()) for w in problem.weights]
            for problem in problems
        ]

    def losses_of_correction(self, correction: float, which: Sequence[int]) -> list[float]:
        """Return the losses of some problems that are corrected, and not rounded."""
        found = [0.0] * len(which)
        for number, fold in enumerate(self._folds):
            curve, seen = self._curve(number, correction)
            for place, problem in enumerate(which):
                found[place] += (
                    math.inf
                    if curve is None
                    else self._loss(problem, self._corrected(problem, seen, curve), fold)
                )
        return found

    def targets(self, corrections: Sequence[float]) -> list[list[list[Tensor]]]:
        """Return what each problem rounds on the others of each fold: problem, fold, weight."""
        found: list[list[list[Tensor]]] = [[] for _ in self._problems]
        for number in range(len(self._folds)):
            curves = {
                each: self._curve(number, each)
                for each in (set(corrections) if self._whole.cross is not None else ())
            }
            for problem, correction in enumerate(corrections):
                targets = [weight.float() for weight in self._problems[problem].weights]
                curve, seen = curves.get(correction, (None, self._whole))
                if curve is not None:
                    targets = self._corrected(problem, seen, curve)
                found[problem].append(targets)
        return found

    def losses_of_damping(
        self, damping: float, which: Sequence[int], targets: Sequence[Sequence[Sequence[Tensor]]]
    ) -> list[float]:
        """Return the losses of some problems that are rounded."""
        found = [0.0] * len(which)
        for number, fold in enumerate(self._folds):
            orders = {self._problems[problem].ordered for problem in which}
            curves = {order: self._curve(number, damping, order) for order in orders}
            for place, problem in enumerate(which):
                each = self._problems[problem]
                curve, seen = curves[each.ordered]
                if curve is None:
                    found[place] = math.inf
                else:
                    values = each.rounded(targets[problem][number], seen, curve)
                    found[place] += self._loss(problem, values, fold)
        return found

    def _curve(
        self, number: int, damping: float, ordered: bool = False
    ) -> tuple[Curvature | None, Moments]:
        """Return the Hessian of all folds but one, and what was seen of them."""
        # Of two folds there is the other one, which need not be worked out.
        others = [fold for fold in self._folds if fold is not self._folds[number]]
        seen = others[0] if len(others) == 1 else self._whole.less(self._folds[number])
        return curvature(seen.mean_hessian(), damping, ordered), seen

    def _corrected(self, problem: int, seen: Moments, curve: Curvature) -> list[Tensor]:
        crosses = seen.mean_crosses()
        return [corrected(w, *crosses, curve) for w in self._problems[problem].weights]

    def _loss(self, problem: int, values: Sequence[Tensor], fold: Moments) -> float:
        pairs = zip(self._problems[problem].weights, values, self._energies[problem], strict=True)
        return sum(held_out_loss(w, q, fold) / energy for w, q, energy in pairs if energy)
