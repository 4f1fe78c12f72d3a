"""From a weight, or a distribution, to the scale and zero point that err least."""

from __future__ import annotations

from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.dispatch import as_grid
from calipers.kernels.optimum import Optimum, best_scales
from calipers.numerics.formats import Format, ScaleKind
from calipers.numerics.qparams import safe_qparams
from calipers.numerics.scales import fine_scales, storable_scales, stored_scales, windows_of
from calipers.observers.descent import by_rows, choose_together, differences, quadratic_error

_TILE = 1 << 22  # numbers worked on at once


class Problem(NamedTuple):
    """What is to be quantized, and how its error counts.

    ``pieces`` has shape (observations, *qparam_shape, rows, columns), ``low`` and ``high`` are its
    extrema, ``weights`` broadcasts with it: the error is Σ w·|q−x|^norm. If there is a ``hessian``,
    blocks of shape (blocks, width, width) along the columns, the ``shortlist`` best candidates by
    that error are judged by Δᵀ H Δ instead, Δ the difference q−x of each row.
    """

    pieces: Tensor
    low: Tensor
    high: Tensor
    args: QuantizationArgs
    norm: float = 2.0
    weights: Tensor | None = None
    hessian: Tensor | None = None
    signed: bool = False
    shortlist: int = 1

    def sample(self, most: int) -> Problem:
        """Return at most about ``most`` of the pieces, evenly spread."""
        step = -(-self.low.numel() // most)
        low, high = (end.flatten(0, -2)[::step] for end in (self.low, self.high))
        return self._replace(pieces=self.pieces.flatten(1, -4)[:, ::step], low=low, high=high)


class Solution(NamedTuple):
    """The parameters to store, and the error Σ w·|q−x|^norm of the whole tensor under them."""

    scale: Tensor
    zero_point: Tensor
    error: float


@torch.no_grad()
def solve(problem: Problem, global_scale: Tensor | None = None) -> Solution:
    """Find the best of all parameters that can be stored."""
    args, fmt = problem.args, Format.of(problem.args)
    scale, zero_point = safe_qparams(problem.low, problem.high, args, global_scale)
    dtype = scale.dtype
    if fmt.scale is ScaleKind.FLOAT and args.scale_dtype is not None:
        dtype = args.scale_dtype
    storable = storable_scales(fmt, dtype, global_scale)
    if storable is None and problem.norm != 2:  # only parabolas can be swept
        largest = max(-float(problem.low.min()), float(problem.high.max()))
        storable = fine_scales(largest or 1.0)
    found = best_scales(
        problem.pieces,
        problem.low,
        problem.high,
        fmt,
        windows=windows_of(fmt, problem.signed),
        storable=storable,
        norm=problem.norm,
        weights=problem.weights,
        keep=problem.shortlist,
    )
    found = _judged_by_hessian(problem, found) if problem.hessian is not None else found
    best, window, error = (part[..., 0] for part in found)
    # Pieces of nothing but zeros take what min-max gives them.
    is_zero = (best == 0).reshape(scale.shape)
    if global_scale is not None:
        best = _under(global_scale, best, stored_scales(fmt, dtype))
    chosen = _signed(best, window, fmt).reshape(scale.shape).to(scale.device)
    zeros = _zero_points(window, fmt).reshape(scale.shape).to(scale.device)
    scale = torch.where(is_zero, scale.to(chosen), chosen).to(scale.dtype)
    zero_point = torch.where(is_zero, zero_point.to(zeros), zeros).to(zero_point.dtype)
    return Solution(scale, zero_point, float(error.sum()))


@torch.no_grad()
def error_of(
    problem: Problem, scale: Tensor, zero_point: Tensor, global_scale: Tensor | None = None
) -> float:
    """Return the error of the whole tensor under given parameters."""
    if global_scale is not None:
        scale = scale.float() / global_scale
    if problem.hessian is not None:
        return quadratic_error(problem.pieces, scale, zero_point, problem.hessian, problem.args)
    x = as_grid(problem.pieces, ordered=True)
    weights = torch.ones(()) if problem.weights is None else problem.weights
    weights = as_grid(weights.to(x.device).expand(problem.pieces.shape), ordered=True)
    scales, zeros = (part.double().reshape(*x.shape[1:3]) for part in (scale, zero_point))
    step = max(1, _TILE // x[:, 0].numel())
    total = 0.0
    for start in range(0, x.shape[1], step):
        these = slice(start, start + step)
        for values, w in zip(by_rows(x[:, these]), by_rows(weights[:, these]), strict=True):
            part = differences(values.double(), scales[these], zeros[these], problem.args)
            total += float((part.abs().pow(problem.norm) * w).sum())
    return total


def _under(global_scale: Tensor, best: Tensor, stored: Tensor | None) -> Tensor:
    """Turn effective scales into those that are stored under a global scale."""
    global_scale = global_scale.detach().float().to(best.device)
    if stored is None:
        return best * global_scale
    stored = stored.to(best.device)
    storable = (stored / global_scale).to(best.dtype)
    return stored[torch.searchsorted(storable, best.contiguous()).clamp(max=len(stored) - 1)]


def _signed(best: Tensor, window: Tensor, fmt: Format) -> Tensor:
    return torch.where(window == 1, -best, best) if fmt.symmetric else best


def _zero_points(window: Tensor, fmt: Format) -> Tensor:
    """Return the zero point of each window; windows are in the order of zero points."""
    values = torch.zeros(2) if fmt.symmetric else fmt.values()
    return values.to(window.device)[window.long()]


def _judged_by_hessian(problem: Problem, found: Optimum) -> Optimum:
    """Keep the candidates with the least Δᵀ H Δ."""
    assert problem.hessian is not None
    fmt = Format.of(problem.args)
    signed = torch.where(found.windows == 1, -1, 1) if fmt.symmetric else 1
    scales = (found.scales * signed).masked_fill(found.scales == 0, 1)
    zeros = _zero_points(found.windows, fmt)
    at = choose_together(problem.pieces, scales, zeros, problem.hessian, problem.args)
    return Optimum(*(part.gather(-1, at.unsqueeze(-1)) for part in found))
