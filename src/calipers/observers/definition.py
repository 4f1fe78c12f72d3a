"""What an observer is: a statistic of a stream, and pure functions that solve from it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import CalipersWarning, ImportanceError, text_of
from calipers.kernels.reductions import Extrema
from calipers.solvers.importance import Weights
from calipers.solvers.scales import Counted, Problem
from calipers.statistics.ranges import LastRange, Observation

Range = tuple[Tensor, Tensor]
"""The low and the high end of each piece."""


class QParamsDict(TypedDict):
    """The parameters a tensor is quantized with."""

    scale: Tensor
    zero_point: Tensor
    global_scale: Tensor | None


@dataclass(frozen=True)
class Definition:
    """The parts of an observer; its options are passed to each function.

    :param statistic: what is kept of the range of a stream
    :param search: finds a better range of one tensor than its extrema; None: the extrema
    :param from_counts: finds the range of a stream from the counts of its values; None: nothing is
        counted
    :param optimum: asks for the best scale of a weight, in place of a range
    :param least_importance: the least that a column of a weight counts, where the mean is 1
    :param check_importance: refuses importance for a tensor and a strategy that have none
    :param is_of_weights: whether it is this for weights alone
    """

    statistic: type[LastRange] = LastRange
    search: Callable[[Problem, Any], Range] | None = None
    from_counts: Callable[[Counted, Any, str], Range | QParamsDict] | None = None
    optimum: Callable[[Extrema, Tensor, QuantizationArgs, Any, Weights], Problem] | None = None
    least_importance: float = 0.0
    check_importance: Callable[[str, QuantizationArgs, str], None] | None = None
    is_of_weights: bool = False


def absmax(low: Tensor, high: Tensor) -> Tensor:
    """Return the largest magnitude of all ranges, from which a global scale is made."""
    return torch.maximum(-low.min(), high.max())


@dataclass(frozen=True)
class SearchedRange:
    """The range that a search finds for each tensor of a stream, for a statistic of ranges."""

    search: Callable[[Problem, Any], Range]
    args: QuantizationArgs
    options: Any

    def __call__(self, seen: Observation) -> Range:
        """Search the range of one tensor."""
        found = seen.extrema
        return self.search(
            Problem(seen.pieces, found.min_vals, found.max_vals, self.args), self.options
        )

    def configuration(self) -> dict[str, Any]:
        """Return what two searches have in common that find the same ranges."""
        args = self.args.model_dump_json(exclude={"observer", "observer_kwargs"})
        return {"args": json.loads(args), "options": self.options.model_dump()}


def weights_or_none(
    weigh: Callable[[], Weights], *, is_strict: bool, is_told: bool
) -> tuple[Weights, bool]:
    """Return what errors are weighed by, and whether a warning has been given.

    Where importance cannot be used all errors count alike, which one warning tells; it is an error
    if the options are strict.
    """
    try:
        return weigh(), is_told
    except ImportanceError as error:
        if is_strict:
            error.add_hint("With strict=False it would fall back to plain error")
            raise
        if not is_told:
            error.add_hint("Falls back to plain error")
            warnings.warn(CalipersWarning(text_of(error)), stacklevel=4)
        return Weights(), True
