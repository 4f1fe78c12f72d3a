"""What an observer is: a statistic of a stream, and pure functions that solve from it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import CalipersWarning, ImportanceError, TensorValueError, text_of
from calipers.kernels.reductions import Extrema
from calipers.numerics.qparams import global_scale_of
from calipers.solvers.importance import Importance, ImportanceTarget, Weights
from calipers.solvers.scales import CountedValues, Problem, Solutions
from calipers.statistics.base import Statistic
from calipers.statistics.ranges import LastRange, Observation

Range = tuple[Tensor, Tensor]
"""The low and the high end of each piece."""


class QParamsDict(TypedDict):
    """The parameters a tensor is quantized with."""

    scale: Tensor
    zero_point: Tensor
    global_scale: Tensor | None


class SolvedTensor(NamedTuple):
    """The range of one tensor.

    :param solutions: of a weight whose scales are chosen themselves, under any global scale
    """

    low: Tensor
    high: Tensor
    solutions: Solutions | None = None


@dataclass(frozen=True)
class Definition:
    """The parts of an observer; its options are passed to each function.

    :param statistic: what is kept of the range of a stream
    :param search: finds a better range of one tensor than its extrema; None: the extrema
    :param is_optimal: whether the best scales of a weight are found, in place of a range
    :param counts_values: whether the values of a stream are counted
    :param range_from_counts: finds the range of a stream from them; None: the extrema
    :param qparams_from_counts: finds scale and zero point from them, in place of a range
    :param least_importance: the least that a column of a weight counts, where the mean is 1
    :param check_importance: refuses importance for a tensor and a strategy that have none
    :param is_of_weights: whether it is this for weights alone
    :param for_weights: the class of observers that takes its place for weights, which are seen
        once; None: it is for weights, too
    :param ignores: options that are without meaning for a weight, and not refused
    """

    statistic: type[LastRange] = LastRange
    search: Callable[[Problem, Any], Range] | None = None
    is_optimal: bool = False
    counts_values: bool = False
    range_from_counts: Callable[[CountedValues, Any], Range] | None = None
    qparams_from_counts: Callable[[CountedValues, Any], QParamsDict] | None = None
    least_importance: float = 0.0
    check_importance: Callable[[str, QuantizationArgs, str], None] | None = None
    is_of_weights: bool = False
    for_weights: type[Any] | None = None
    ignores: tuple[str, ...] = ()

    @property
    def takes_extrema(self) -> bool:
        """Whether what is kept of the range of a tensor are its extrema."""
        return self.search is None and not self.is_optimal

    def weights(
        self,
        importance: Importance,
        inputs: Statistic | None,
        target: ImportanceTarget,
        options: Any,
        has_warned: bool,
    ) -> tuple[Weights, bool]:
        """Return what the errors of a weight are weighed by, and whether a warning has been given.

        Where importance cannot be used all errors count alike, which one warning tells; it is an
        error if the options are strict.
        """
        try:
            if self.check_importance is not None:
                layout = target.layout
                self.check_importance(layout.base_name, layout.args, target.label)
            if not importance.fields:
                return Weights(), has_warned
            target = target._replace(least=self.least_importance)
            return importance.weights(inputs, target), has_warned
        except ImportanceError as error:
            if getattr(options, "strict", False):
                error.add_hint("With strict=False it would fall back to plain error")
                raise
            if not has_warned:
                error.add_hint("Falls back to plain error")
                warnings.warn(CalipersWarning(text_of(error)), stacklevel=4)
            return Weights(), True

    def solve(
        self, seen: Extrema, pieces: Tensor, args: QuantizationArgs, options: Any, weights: Weights
    ) -> SolvedTensor:
        """Find the range, or the scales, of one tensor."""
        low, high = seen.min_vals, seen.max_vals
        if self.is_optimal:
            if seen.missing is not None:  # pieces without any finite value are pieces of zeros
                low, high = low.masked_fill(seen.missing, 0), high.masked_fill(seen.missing, 0)
            problem = Problem(
                pieces.detach(),
                low,
                high,
                args,
                weights=weights,
                signed=options.signed_scale,
                shortlist=options.shortlist if weights.hessian is not None else 1,
            )
            return SolvedTensor(low, high, Solutions(problem))
        if self.search is not None:
            low, high = self.search(Problem(pieces, low, high, args, weights=weights), options)
        return SolvedTensor(low, high)


@dataclass(frozen=True)
class SearchedRange:
    """The range that a definition finds for each tensor of a stream, for a statistic of ranges."""

    definition: Definition
    args: QuantizationArgs
    options: Any

    def __call__(self, seen: Observation) -> Range:
        """Find the range of one tensor."""
        definition, options = self.definition, self.options
        solved = definition.solve(seen.extrema, seen.pieces, self.args, options, Weights())
        return solved.low, solved.high

    def configuration(self) -> dict[str, Any]:
        """Return what two searches have in common that find the same ranges."""
        args = self.args.model_dump_json(exclude={"observer", "observer_kwargs"})
        return {"args": json.loads(args), "options": self.options.model_dump()}


def usual_global_scale(ranges: Iterable[Range], label: str) -> Tensor:
    """Return the scale of the local scales from the largest magnitude of all ranges."""
    magnitudes = [torch.maximum(-low.min(), high.max()) for low, high in ranges]
    largest = magnitudes[0]
    for magnitude in magnitudes[1:]:
        largest = torch.maximum(largest, magnitude.to(largest.device))
    return global_scale_of(largest, label)


def check_countable(
    low: Tensor, high: Tensor, dtype: torch.dtype, label: str, end: str = ""
) -> None:
    """Refuse values that would be infinite where they are counted; ``end`` ends the message."""
    if dtype == torch.float16 or not torch.stack([low, high]).bfloat16().isinf().any():
        return
    raise TensorValueError(
        f"was given values from {float(low.min()):g} to {float(high.max()):g} "
        f"({dtype}). They are counted as bfloat16, which ends at ±3.38953e+38{end}",
        subject=label,
        hint="Scale the tensor down, or use 'static_minmax'",
    )
