"""The best of all scales and zero points that can be stored: for a weight, or for counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.errors import weight_gone
from calipers.kernels.joint import choose_together
from calipers.kernels.optimum import best_scales
from calipers.numerics.formats import Format, ScaleKind
from calipers.numerics.qparams import qparams_of, safe_qparams
from calipers.numerics.scales import (
    fine_scales,
    storable_scales,
    stored_scales,
    windows_of,
)
from calipers.numerics.tensors import tensor_version
from calipers.solvers.minmax import minmax
from calipers.solvers.problem import (
    Counted,
    Problem,
    Solution,
    effective,
    error_of,
    errors_of,
    overflows,
)

_SAMPLE = 1 << 15  # pieces of a tensor by which a global scale is chosen


class _Candidates(NamedTuple):
    """Scales as they are stored, and zero points: (*qparam_shape, candidates)."""

    scales: Tensor
    zeros: Tensor

    def at(self, index: Tensor | int) -> tuple[Tensor, Tensor]:
        """Return one candidate of each piece."""
        if isinstance(index, int):
            return self.scales[..., index], self.zeros[..., index]
        at = index.unsqueeze(-1)
        return self.scales.gather(-1, at).squeeze(-1), self.zeros.gather(-1, at).squeeze(-1)


@torch.no_grad()
def exact(problem: Problem, global_scale: Tensor | None = None) -> Solution:
    """Find the best of all parameters that can be stored. Min-max is always tried, too.

    Candidates are judged as compressed-tensors stores them, a plain scale in the dtype of the
    pieces, and by its arithmetic. The error that is told is Σ w·|q−x|^norm, also under a Hessian.

    >>> from compressed_tensors.quantization import QuantizationArgs
    >>> values = torch.tensor([[[[-2.0, 1.0, 0.9]]]])
    >>> args = QuantizationArgs(num_bits=2)
    >>> found = exact(Problem(values, torch.tensor([-2.0]), torch.tensor([1.0]), args))
    >>> round(found.scale.item(), 4), round(found.error, 4)
    (0.9833, 0.0083)
    """
    extremes = problem.extremes or (problem.low, problem.high)
    usual = safe_qparams(*extremes, problem.args, global_scale)
    found = _searched(problem, global_scale)
    candidates = _with_minmax(problem, found, *usual, global_scale)
    chosen, errors = _judged(problem, candidates, global_scale)
    scale, zero_point = (
        part.reshape(like.shape).to(like) for part, like in zip(chosen, usual, strict=True)
    )
    return Solution(scale, zero_point, float(errors.sum()))


def least_error(
    seen: Counted, norm: float = 2.0, where: str = "least_error"
) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point with the least Σ|q−x|^norm over all values that were seen.

    A piece without any value gets those of its range; one of which none can be made is refused.
    """
    scale, zero_point = qparams_of(seen.low, seen.high, seen.args, None, where)
    shape = scale.shape
    scale, zero_point = scale.flatten(), zero_point.flatten()
    lows, highs = seen.low.flatten(), seen.high.flatten()
    for piece, values in enumerate(seen.distributions):
        if len(values.values):
            ends = lows[piece], highs[piece]
            best = exact(Problem.of_counts(values, *ends, seen.args, norm))
            scale[piece], zero_point[piece] = best.scale, best.zero_point
    return scale.reshape(shape), zero_point.reshape(shape)


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
            raise weight_gone(self.label, "cannot trust, since it was changed in place,")
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


# The search


def _searched(problem: Problem, global_scale: Tensor | None) -> _Candidates:
    """Search all scales; one of zero stands for a piece of zeros."""
    fmt, dtype = Format.of(problem.args), problem.pieces.dtype
    wanted = problem.args.scale_dtype if fmt.scale is ScaleKind.FLOAT else None
    storable = storable_scales(fmt, dtype, global_scale, wanted)
    if storable is None and problem.norm != 2:  # only parabolas can be swept
        largest = max(-float(problem.low.min()), float(problem.high.max()))
        storable = fine_scales(largest or 1.0)
    scales, window, _ = best_scales(
        problem.pieces,
        problem.low,
        problem.high,
        fmt,
        windows=windows_of(fmt, problem.signed),
        storable=storable,
        norm=problem.norm,
        weights=problem.factors,
        keep=problem.shortlist,
        most=torch.finfo(dtype).max,
    )
    if global_scale is not None:
        stored = _under(global_scale, scales, stored_scales(fmt, dtype, wanted))
        scales = torch.where(scales == 0, 0, stored)
    mirrored = (window == 1) & fmt.symmetric
    return _Candidates(torch.where(mirrored, -scales, scales), _zero_points(window, fmt))


def _with_minmax(
    problem: Problem,
    found: _Candidates,
    scale: Tensor,
    zero_point: Tensor,
    global_scale: Tensor | None,
) -> _Candidates:
    """Add min-max, as it is stored; where it is unsound there is nothing to add."""
    shape = problem.low.shape
    scale = scale.reshape(shape).to(problem.pieces.dtype).to(found.scales)
    zero_point = zero_point.reshape(shape).to(found.zeros)
    # Pieces of nothing but zeros take what min-max gives them.
    is_zero = found.scales == 0
    found = _Candidates(
        torch.where(is_zero, scale.unsqueeze(-1), found.scales),
        torch.where(is_zero, zero_point.unsqueeze(-1), found.zeros),
    )
    sound = torch.isfinite(scale) & (scale > 0)
    sound &= ~overflows(problem, scale, zero_point, global_scale)
    best, zero_of_best = found.at(0)
    added = torch.where(sound, scale, best), torch.where(sound, zero_point, zero_of_best)
    return _Candidates(
        *(torch.cat([old, new.unsqueeze(-1)], -1) for old, new in zip(found, added, strict=True))
    )


def _judged(
    problem: Problem, candidates: _Candidates, global_scale: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return the best candidate of each piece, and its plain error."""
    hessian = problem.weights.hessian
    if hessian is not None:
        scales, zeros = effective(candidates.scales, global_scale), candidates.zeros
        at = choose_together(problem.pieces, scales, zeros, hessian, problem.args)
        chosen = candidates.at(at)
        return chosen, errors_of(problem, *chosen, global_scale)
    best, usual = candidates.at(0), candidates.at(-1)
    errors, of_minmax = (
        errors_of(problem, *each, global_scale).masked_fill_(
            overflows(problem, *each, global_scale), torch.inf
        )
        for each in (best, usual)
    )
    keep = errors <= of_minmax
    scale, zero_point = (
        torch.where(keep, ours, theirs) for ours, theirs in zip(best, usual, strict=True)
    )
    return (scale, zero_point), torch.where(keep, errors, of_minmax)


def _under(global_scale: Tensor, best: Tensor, stored: Tensor | None) -> Tensor:
    """Turn effective scales into those that are stored under a global scale."""
    global_scale = global_scale.detach().float().to(best.device)
    if stored is None:
        return best * global_scale
    stored = stored.to(best.device)
    storable = (stored / global_scale).to(best.dtype)
    return stored[torch.searchsorted(storable, best.contiguous()).clamp(max=len(stored) - 1)]


def _zero_points(window: Tensor, fmt: Format) -> Tensor:
    """Return the zero point of each window; windows are in the order of zero points."""
    values = torch.zeros(2) if fmt.symmetric else fmt.values()
    return values.to(window.device)[window.long()]
