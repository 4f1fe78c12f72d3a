"""From statistics to parameters without observers: what engines call for tensors of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.errors import no_statistics
from calipers.numerics.layout import has_global_scale
from calipers.numerics.qparams import global_scale_of, qparams_of
from calipers.observers.base import Observer
from calipers.observers.definition import Definition, QParamsDict, Range, absmax, weights_or_none
from calipers.observers.histogram import check_countable, covered_range
from calipers.observers.spec import COUNTS, RANGE, ObserverSpec
from calipers.solvers.exact import Solutions
from calipers.solvers.global_scale import common_global_scale
from calipers.solvers.importance import Importance, Weighed, Weights
from calipers.solvers.problem import Counted, Problem
from calipers.statistics.base import Statistic
from calipers.statistics.locking import full_precision
from calipers.statistics.observation import Observation, observation_of
from calipers.statistics.ranges import LastRange
from calipers.statistics.value_counts import ValueCounts

# Weights


class Weight(NamedTuple):
    """A weight, and what is known of the inputs of its module.

    :param is_told: whether somebody has told already that importance cannot be used
    """

    spec: ObserverSpec
    value: Tensor
    inputs: Statistic | None
    module_name: str
    is_told: bool = False

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.spec.label(self.module_name)


@torch.no_grad()
def solve_weights(weights: Sequence[Weight]) -> list[QParamsDict]:
    """Return the parameters of weights; several share one global scale (TENSOR_GROUP)."""
    with full_precision():
        definitions = [weight.spec.definition for weight in weights]
        known = [definition for definition in definitions if definition is not None]
        if len(known) < len(weights):
            return _solve_by_observers(weights)
        solved = [_Solved.of(*pair) for pair in zip(weights, known, strict=True)]
        return [each.under(_global_scale(each, solved)) for each in solved]


@dataclass
class _Solved:
    """A weight whose range is known, or whose best scales can be asked for."""

    weight: Weight
    range: Range
    solutions: Solutions | None = None

    @classmethod
    def of(cls, weight: Weight, definition: Definition) -> _Solved:
        spec = weight.spec
        seen = observation_of(
            weight.value,
            "weight",
            spec.args,
            nonfinite=spec.options.nonfinite,
            label=lambda: weight.label,
        )
        if seen is None or (seen.extrema.nonfinite and seen.is_finite_nowhere):
            raise no_statistics(weight.module_name)
        counting = _weights_of_errors(weight, definition, seen)
        if definition.optimum is not None:
            problem = definition.optimum(
                seen.extrema, seen.pieces, spec.args, spec.options, counting
            )
            return cls(weight, (problem.low, problem.high), Solutions(problem, weight.label))
        low, high = seen.extrema.min_vals, seen.extrema.max_vals
        if definition.search is not None:
            problem = Problem(seen.pieces, low, high, spec.args, weights=counting)
            low, high = definition.search(problem, spec.options)
        return cls(weight, (low.to(seen.pieces.dtype), high.to(seen.pieces.dtype)))

    def under(self, global_scale: Tensor | None) -> QParamsDict:
        if self.solutions is not None:
            scale, zero_point, _ = self.solutions.under(global_scale)
        else:
            args, label = self.weight.spec.args, self.weight.label
            scale, zero_point = qparams_of(*self.range, args, global_scale, label)
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}


def _global_scale(weight: _Solved, group: Sequence[_Solved]) -> Tensor | None:
    """Return the scale of the local scales: the best for all weights of the group, or the usual."""
    if not has_global_scale(weight.weight.spec.args):
        return None
    largest = absmax(*weight.range)
    for other in group:
        largest = torch.maximum(largest, absmax(*other.range).to(largest.device))
    usual = global_scale_of(largest, weight.weight.label)
    choosing = [other.solutions for other in group if other.solutions is not None]
    return usual if len(choosing) < len(group) else common_global_scale(choosing, usual)


def _weights_of_errors(weight: Weight, definition: Definition, seen: Observation) -> Weights:
    def weigh() -> Weights:
        importance: Importance = weight.spec.importance
        if definition.check_importance is not None:
            definition.check_importance("weight", weight.spec.args, weight.label)
        if not importance.fields:
            return Weights()
        of = Weighed(seen.pieces, seen.layout, weight.label, definition.least_importance)
        return importance.weights(weight.inputs, of)

    is_strict = getattr(weight.spec.options, "strict", False)
    return weights_or_none(weigh, is_strict=is_strict, is_told=weight.is_told)[0]


def _solve_by_observers(weights: Sequence[Weight]) -> list[QParamsDict]:
    """Show weights to observers, at least one of which is a class of somebody else."""
    observers = [weight.spec.build(weight.module_name) for weight in weights]
    if len(observers) > 1:
        Observer.fuse(observers)
    for weight, observer in zip(weights, observers, strict=True):
        if weight.is_told:
            observer.fall_back_silently()
        observer.inputs = weight.inputs
        observer(weight.value)
    return [observer.get_qparams() for observer in observers]


# Activations and attention states


@torch.no_grad()
def solve_stream(
    spec: ObserverSpec, seen: Mapping[str, Statistic | None], module_name: str = ""
) -> QParamsDict | None:
    """Return the parameters of a tensor from its statistics; None where nothing was seen.

    :param seen: the statistics that the spec asks for, by their keys
    """
    found = _solved_stream(spec, seen, module_name)
    if found is None or isinstance(found, dict):
        return found
    with full_precision():
        args, label = spec.args, spec.label(module_name)
        global_scale = None
        if has_global_scale(args):
            global_scale = global_scale_of(absmax(*found), label)
        scale, zero_point = qparams_of(*found, args, global_scale, label)
    return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}


@torch.no_grad()
def range_of_stream(
    spec: ObserverSpec, seen: Mapping[str, Statistic | None], module_name: str = ""
) -> Range | None:
    """Return the range that the parameters of a tensor are made from; None without data."""
    ranged = seen.get(RANGE)
    if isinstance(ranged, Observer):
        return ranged.get_range() if ranged.has_statistics else None
    found = _solved_stream(spec, seen, module_name)
    if found is None or not isinstance(found, dict):
        return found
    extrema = ranged.range() if isinstance(ranged, LastRange) else None
    assert extrema is not None
    return covered_range(found, spec.args, extrema[0].shape)


def _solved_stream(
    spec: ObserverSpec, seen: Mapping[str, Statistic | None], module_name: str
) -> Range | QParamsDict | None:
    ranged, counts, definition = seen.get(RANGE), seen.get(COUNTS), spec.definition
    if isinstance(ranged, Observer):
        return ranged.get_qparams() if ranged.has_statistics else None
    ends = ranged.range() if isinstance(ranged, LastRange) else None
    if ends is None or definition is None or definition.from_counts is None:
        return ends
    if not isinstance(counts, ValueCounts) or not counts.fields():
        return ends  # the range was found elsewhere, as that of the peers of an unseen expert
    label = spec.label(module_name)
    with full_precision():
        check_countable(*ends, ends[0].dtype, label)
        counted = Counted(counts.distributions(), *ends, spec.args)
        return definition.from_counts(counted, spec.options, label)
