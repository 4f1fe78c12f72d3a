"""Solvers for scales and zero points: min-max, and the exact optimum."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import weight_gone
from calipers.kernels.hessian import choose_candidates, quadratic_error
from calipers.kernels.optimum import ScaleSearch, best_scales
from calipers.kernels.rounding import Quantization, quantization_errors
from calipers.numerics.formats import (
    Format,
    ScaleKind,
    fine_scales,
    storable_scales,
    stored_scales,
    windows_of,
)
from calipers.numerics.qparams import qparams_of, quantize_dequantize, safe_qparams
from calipers.numerics.tensors import tensor_version
from calipers.solvers.importance import Weights
from calipers.statistics.value_counts import Distribution

_SAMPLE = 1 << 15  # pieces of a tensor by which a global scale is chosen
_FACTORS = (0.875, 0.75, 0.625)  # of the usual global scale, that are tried


class Problem(NamedTuple):
    """What is to be quantized, and how its error counts.

    The error is Σ w·|q−x|^norm. Where there is a Hessian, solvers that can judge by it go by Δᵀ H Δ
    instead, Δ the difference q−x of each row.

    :param pieces: values, shape (observations, *qparam_shape, rows, columns)
    :param low: the least of each piece
    :param high: the largest of each piece
    :param weights: what errors are weighed by
    :param counts: how often each value occurred, in the shape of the pieces; None: once
    :param extremes: what min-max goes by, where the pieces are rounded
    :param signed: whether scales may be negative
    :param shortlist: how many candidates by the plain error are judged by the Hessian
    """

    pieces: Tensor
    low: Tensor
    high: Tensor
    args: QuantizationArgs
    norm: float = 2.0
    weights: Weights = Weights()
    counts: Tensor | None = None
    extremes: tuple[Tensor, Tensor] | None = None
    signed: bool = False
    shortlist: int = 1

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The range of each piece that min-max goes by."""
        return self.extremes or (self.low, self.high)

    @property
    def factors(self) -> Tensor | None:
        """What the error of each value is multiplied by; broadcasts with the pieces."""
        return self.weights.diagonal if self.counts is None else self.counts.double()

    def sample(self, most: int) -> Problem:
        """Return at most about ``most`` of the pieces, evenly spread, without the Hessian."""
        step = -(-self.low.numel() // most)
        low, high = (end.flatten(0, -2)[::step] for end in (self.low, self.high))
        return self._replace(
            pieces=self.pieces.flatten(1, -4)[:, ::step],
            low=low,
            high=high,
            weights=self.weights._replace(hessian=None),
            shortlist=1,
        )


class CountedValues(NamedTuple):
    """What is known of the values of a tensor.

    :param distributions: how often each value of each piece occurred, in the order of the qparams
    :param low: the exact least value of each piece
    :param high: the exact largest value of each piece
    :param label: what messages call the one who counted them
    """

    distributions: Iterable[Distribution]
    low: Tensor
    high: Tensor
    args: QuantizationArgs
    label: str = "least_error"


class Solution(NamedTuple):
    """The parameters to store, and the error of the whole tensor under them."""

    scale: Tensor
    zero_point: Tensor
    error: float


@torch.no_grad()
def error_of(
    problem: Problem, scale: Tensor, zero_point: Tensor, global_scale: Tensor | None = None
) -> float:
    """Return the error of the whole tensor under given parameters: by the Hessian, if there is one.

    It is infinite where a value leaves the dtype of the tensor, or the sum float64.
    """
    hessian = problem.weights.hessian
    if bool(overflows(problem, scale, zero_point, global_scale).any()):
        return torch.inf
    if hessian is None:
        return float(errors_of(problem, scale, zero_point, global_scale).sum())
    scale = effective(scale, global_scale)
    return quadratic_error(problem.pieces, scale, zero_point, hessian, problem.args)


def errors_of(
    problem: Problem, scale: Tensor, zero_point: Tensor, global_scale: Tensor | None = None
) -> Tensor:
    """Return Σ w·|q−x|^norm of each piece."""
    return quantization_errors(
        Quantization(
            problem.pieces,
            effective(scale, global_scale),
            zero_point,
            problem.args,
            problem.norm,
            problem.factors,
        )
    )


def overflows(
    problem: Problem, scale: Tensor, zero_point: Tensor, global_scale: Tensor | None = None
) -> Tensor:
    """Whether what becomes of the extrema, hence of any value, leaves the dtype of the pieces."""
    fmt, shape = Format.of(problem.args), problem.low.shape
    scale = effective(scale, global_scale).reshape(shape)
    scale = scale.to(torch.promote_types(scale.dtype, torch.float32))
    zeros = None if fmt.symmetric else zero_point.reshape(shape).to(scale)
    ends = (
        quantize_dequantize(end.to(scale), scale, zeros, fmt).abs()
        for end in (problem.low, problem.high)
    )
    return ~(torch.maximum(*ends) <= torch.finfo(problem.pieces.dtype).max)


def effective(scale: Tensor, global_scale: Tensor | None) -> Tensor:
    """Return what codes are multiplied by."""
    if global_scale is None:
        return scale
    wide = scale.to(torch.promote_types(scale.dtype, torch.float32))
    return wide / global_scale.to(scale.device)


def minmax(problem: Problem, global_scale: Tensor | None = None) -> Solution:
    """Let the codes cover the whole range of each piece.

    >>> values = torch.tensor([[[[-7.5, 1.0, 3.0]]]])
    >>> args = QuantizationArgs(num_bits=4)
    >>> minmax(Problem(values, torch.tensor([-7.5]), torch.tensor([3.0]), args))
    Solution(scale=tensor([1.]), zero_point=tensor([0], dtype=torch.int8), error=0.25)
    """
    return of_range(problem, *problem.ends, global_scale)


def of_range(
    problem: Problem, low: Tensor, high: Tensor, global_scale: Tensor | None = None
) -> Solution:
    """Let the codes cover a given range of each piece."""
    scale, zero_point = safe_qparams(low, high, problem.args, global_scale)
    return Solution(scale, zero_point, error_of(problem, scale, zero_point, global_scale))


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

    >>> values = torch.tensor([[[[-2.0, 1.0, 0.9]]]])
    >>> args = QuantizationArgs(num_bits=2)
    >>> found = exact(Problem(values, torch.tensor([-2.0]), torch.tensor([1.0]), args))
    >>> round(found.scale.item(), 4), round(found.error, 4)
    (0.9833, 0.0083)
    """
    usual = safe_qparams(*problem.ends, problem.args, global_scale)
    found = _searched(problem, global_scale)
    candidates = _with_minmax(problem, found, *usual, global_scale)
    chosen, errors = _judged(problem, candidates, global_scale)
    scale, zero_point = (
        part.reshape(like.shape).to(like) for part, like in zip(chosen, usual, strict=True)
    )
    return Solution(scale, zero_point, float(errors.sum()))


def least_error(seen: CountedValues, norm: float = 2.0) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point with the least Σ|q−x|^norm over all values that were seen.

    A piece without any value gets those of its range; one of which none can be made is refused.
    """
    scale, zero_point = qparams_of(seen.low, seen.high, seen.args, None, seen.label)
    shape = scale.shape
    scale, zero_point = scale.flatten(), zero_point.flatten()
    lows, highs = seen.low.flatten(), seen.high.flatten()
    for piece, (values, counts) in enumerate(seen.distributions):
        if not len(values):
            continue
        values = values.to(lows.dtype).reshape(1, 1, 1, -1)
        problem = Problem(
            values,
            values.min().reshape(1),
            values.max().reshape(1),
            seen.args,
            norm,
            counts=counts.reshape(values.shape),
            # Values may have been rounded to be counted; these are exact.
            extremes=(lows[piece].reshape(1).cpu(), highs[piece].reshape(1).cpu()),
        )
        best = exact(problem)
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
    search = ScaleSearch(
        *(problem.pieces, problem.low, problem.high, fmt),
        windows=windows_of(fmt, problem.signed),
        storable=storable,
        norm=problem.norm,
        weights=problem.factors,
        keep=problem.shortlist,
        most=torch.finfo(dtype).max,
    )
    scales, window, _ = best_scales(search)
    if global_scale is not None:  # turn effective scales into those that are stored under it
        divisor = global_scale.detach().float().to(scales.device)
        stored = stored_scales(fmt, dtype, wanted)
        if stored is None:
            scales = scales * divisor
        else:
            stored = stored.to(scales.device)
            index = torch.searchsorted((stored / divisor).to(scales.dtype), scales.contiguous())
            scales = torch.where(scales == 0, 0, stored[index.clamp(max=len(stored) - 1)])
    if fmt.symmetric:  # the second window is that of negative scales
        zeros = torch.zeros_like(scales, dtype=torch.float32)
        return _Candidates(torch.where(window == 1, -scales, scales), zeros)
    # Windows are in the order of zero points.
    return _Candidates(scales, fmt.values().to(window.device)[window.long()])


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
        index = choose_candidates(problem.pieces, scales, zeros, hessian, problem.args)
        chosen = candidates.at(index)
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
