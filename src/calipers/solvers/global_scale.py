"""The scale of the scales (NVFP4): one for all weights that run as one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from calipers.errors import WeightGoneError
from calipers.numerics.tensors import tensor_version
from calipers.solvers.exact import exact
from calipers.solvers.minmax import minmax
from calipers.solvers.problem import Problem, Solution, error_of

_FACTORS = (0.875, 0.75, 0.625)
_SAMPLE = 1 << 15  # pieces of a tensor by which a global scale is chosen


class Solutions:
    """The optima of one weight under one global scale or another, each worked out once.

    :param label: what messages call the one who asks
    """

    def __init__(self, problem: Problem, label: str = "") -> None:
        self._problem, self.label = problem, label
        self._version = tensor_version(problem.pieces)
        self._solutions: dict[float | None, Solution] = {}
        self._errors: dict[tuple[str, float], float] = {}

    @property
    def problem(self) -> Problem:
        """What was asked; the weight must be as it was."""
        if tensor_version(self._problem.pieces) != self._version:
            raise WeightGoneError(self.label, "cannot trust, since it was changed in place,")
        return self._problem

    def under(self, global_scale: Tensor | None) -> Solution:
        """Return the optimum under a global scale."""
        key = None if global_scale is None else float(global_scale)
        if key not in self._solutions:
            self._solutions[key] = exact(self.problem, global_scale)
        return self._solutions[key]

    def error(self, global_scale: Tensor) -> float:
        """Return the error of the optimum; by the Hessian, if there is one."""
        solution = self.under(global_scale)
        if self.problem.weights.hessian is None:
            return solution.error
        return error_of(self.problem, solution.scale, solution.zero_point, global_scale)

    def sampled_error(self, global_scale: Tensor) -> float:
        """Return the error of the optimum of a sample of the pieces."""
        return exact(self.problem.sample(_SAMPLE), global_scale).error

    def minmax_error(self, global_scale: Tensor) -> float:
        """Return the error of min-max."""
        return minmax(self.problem, global_scale).error

    def once(self, error: Callable[[Solutions, Tensor], float], global_scale: Tensor) -> float:
        """Return one of these errors, worked out at most once."""
        key = error.__name__, float(global_scale)
        if key not in self._errors:
            self._errors[key] = error(self, global_scale)
        return self._errors[key]


def common_global_scale(weights: Sequence[Solutions], usual: Tensor) -> Tensor:
    """Choose among a few by how well a sample of all weights can be quantized.

    :param usual: the one that min-max takes, and the first candidate
    """
    candidates = [usual, *(usual * factor for factor in _FACTORS)]
    errors = [_total(weights, Solutions.sampled_error, scale) for scale in candidates]
    best = candidates[min(range(len(errors)), key=errors.__getitem__)]
    if best is usual:
        return usual
    # A sample may mislead; under the usual one nothing errs more than with min-max.
    chosen = _total(weights, Solutions.error, best)
    return best if chosen <= _total(weights, Solutions.minmax_error, usual) else usual


def _total(
    weights: Sequence[Solutions],
    error: Callable[[Solutions, Tensor], float],
    global_scale: Tensor,
) -> float:
    """Sum an error exactly: whoever asks, in whatever order, comes to the same choice."""
    return math.fsum(each.once(error, global_scale) for each in weights)
