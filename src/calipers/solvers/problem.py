"""What a solver is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.rounding import quantization_errors
from calipers.numerics.formats import Format
from calipers.numerics.qparams import quantize_dequantize
from calipers.solvers.hessian import quadratic_error
from calipers.solvers.importance import Weights
from calipers.statistics.value_counts import Distribution


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

    @classmethod
    def of_counts(
        cls, seen: Distribution, low: Tensor, high: Tensor, args: QuantizationArgs, norm: float
    ) -> Problem:
        """Ask for the parameters of one piece of which it is known how often each value occurred.

        :param low: the exact least value; those that were counted may be rounded
        :param high: the exact largest value
        """
        values = seen.values.to(low.dtype).reshape(1, 1, 1, -1)
        return cls(
            values,
            values.min().reshape(1),
            values.max().reshape(1),
            args,
            norm,
            counts=seen.counts.reshape(values.shape),
            extremes=(low.reshape(1).cpu(), high.reshape(1).cpu()),
        )

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


class Counted(NamedTuple):
    """What is known of the values of a tensor.

    :param distributions: how often each value of each piece occurred, in the order of the qparams
    :param low: the exact least value of each piece
    :param high: the exact largest value of each piece
    """

    distributions: Iterable[Distribution]
    low: Tensor
    high: Tensor
    args: QuantizationArgs


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

    >>> values = torch.tensor([[[[1.0, 2.2, -3.5]]]])
    >>> problem = Problem(values, values.amin((0, 2, 3)), values.amax((0, 2, 3)),
    ...                   QuantizationArgs(num_bits=4))
    >>> round(error_of(problem, torch.tensor([0.5]), torch.zeros(1)), 4)
    0.04
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
        problem.pieces,
        effective(scale, global_scale),
        zero_point,
        problem.args,
        problem.norm,
        problem.factors,
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
