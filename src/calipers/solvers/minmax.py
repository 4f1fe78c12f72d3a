"""The range as it is."""

from __future__ import annotations

from torch import Tensor

from calipers.numerics.qparams import safe_qparams
from calipers.solvers.problem import Problem, Solution, error_of


def minmax(problem: Problem, global_scale: Tensor | None = None) -> Solution:
    """Let the codes cover the whole range of each piece.

    >>> import torch
    >>> from compressed_tensors.quantization import QuantizationArgs
    >>> values = torch.tensor([[[[-7.5, 1.0, 3.0]]]])
    >>> args = QuantizationArgs(num_bits=4)
    >>> minmax(Problem(values, torch.tensor([-7.5]), torch.tensor([3.0]), args))
    Solution(scale=tensor([1.]), zero_point=tensor([0], dtype=torch.int8), error=0.25)
    """
    return of_range(problem, *(problem.extremes or (problem.low, problem.high)), global_scale)


def of_range(
    problem: Problem, low: Tensor, high: Tensor, global_scale: Tensor | None = None
) -> Solution:
    """Let the codes cover a given range of each piece."""
    scale, zero_point = safe_qparams(low, high, problem.args, global_scale)
    return Solution(scale, zero_point, error_of(problem, scale, zero_point, global_scale))
