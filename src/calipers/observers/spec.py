"""How a tensor is observed, resolved once: what must be measured, and how that is solved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from typing_extensions import Self

from calipers.errors import no_statistics
from calipers.numerics.layout import check_base_name, has_global_scale, strategy_name
from calipers.numerics.library_versions import named_observer
from calipers.numerics.qparams import global_scale_of, qparams_of
from calipers.observers.base import Observer
from calipers.observers.compatibility import construct, constructor_parameters
from calipers.observers.definition import (
    Definition,
    QParamsDict,
    Range,
    SearchedRange,
    absmax,
    weights_or_none,
)
from calipers.observers.histogram import check_countable, covered_range
from calipers.observers.options import ObserverOptions
from calipers.solvers.importance import Importance, Weighed, Weights
from calipers.solvers.scales import Counted, Problem, Solutions, common_global_scale
from calipers.statistics.base import Statistic, full_precision
from calipers.statistics.ranges import LastRange, Observation, observation_of
from calipers.statistics.value_counts import ValueCounts

_MEMORYLESS = {
    "minmax": "memoryless_minmax",
    "static_minmax": "memoryless_minmax",
    "mse": "memoryless_mse",
}
RANGE = "observer"
"""The key of the statistic of the range of activations, or of the observer that is one itself."""
COUNTS = "counts"
"""The key of the counts of all values."""
_OF_A_STREAM = ("averaging_constant",)


def default_observer(base_name: str) -> str:
    """Return the name of the observer of a tensor for which nobody chose one."""
    return "memoryless_minmax" if base_name == "weight" else "static_minmax"


@dataclass(frozen=True, eq=False)
class ObserverSpec:
    """An observer before it is built: frozen, and checked as its constructor would check.

    :param base_name: what is observed
    :param args: how it will be quantized, with the options that the observer is given
    :param kind: its class
    :param options: all options, with their defaults
    :param importance: how errors count, and what must be known of inputs for that
    """

    base_name: str
    args: QuantizationArgs
    kind: type[Observer]
    options: ObserverOptions
    importance: Importance

    @classmethod
    def resolve(
        cls, base_name: str, args: QuantizationArgs, *, allow_code: bool = False
    ) -> Self | None:
        """Return the spec of the observer of a tensor; None where its scale is found as it runs.

        Weights are seen once: a moving average over them is their last value.

        :param allow_code: whether a file of code that the arguments name may run; without it, its
            class must be loaded already

        >>> spec = ObserverSpec.resolve("weight", QuantizationArgs(observer="minmax"))
        >>> spec.name, spec.importance.name, spec.counts_values
        ('memoryless_minmax', 'none', False)
        """
        if args.dynamic is True:
            return None
        check_base_name(base_name)
        name = named_observer(args) or default_observer(base_name)
        kind = Observer.get_value_from_registry(name, allow_code=allow_code)
        given = dict(args.observer_kwargs or {})
        if base_name == "weight" and kind.registered_name() in _MEMORYLESS:
            kind = Observer.get_value_from_registry(
                _MEMORYLESS[kind.registered_name()], allow_code=False
            )
        if base_name == "weight" and kind.registered_name().startswith("memoryless"):
            given = {key: value for key, value in given.items() if key not in _OF_A_STREAM}
        own = given.keys() & constructor_parameters(kind)  # a class may read options itself
        options = kind.checked_options(
            base_name, args, {key: value for key, value in given.items() if key not in own}
        )
        return cls(
            base_name,
            args.model_copy(update={"observer_kwargs": given}, deep=True),
            kind,
            options,
            kind.importance_under(base_name, options),
        )

    @property
    def name(self) -> str:
        """The name of the observer."""
        return self.kind.registered_name()

    @property
    def options_given(self) -> dict[str, Any]:
        """The options as they were given, without defaults."""
        return dict(self.args.observer_kwargs or {})

    @property
    def counts_values(self) -> bool:
        """Whether what it measures are the counts of all values."""
        return self.kind.counts_values

    @property
    def definition(self) -> Definition | None:
        """The parts of the observer; None for a class of somebody else, which is shown tensors.

        So are classes of ours for tensors that they can take, but are not made for: weights whose
        values would be counted, and activations under importance.
        """
        found: Definition | None = vars(self.kind).get("definition")
        if found is None:
            return None
        is_weight = self.base_name == "weight"
        is_other_tensor = found.from_counts if is_weight else found.is_of_weights
        return None if is_other_tensor else found

    def label(self, module_name: str = "") -> str:
        """Return what messages call the observer of a tensor."""
        return self.kind.label_of(self.base_name, module_name)

    @property
    def statistics(self) -> dict[str, Callable[[str], Statistic]]:
        """What is measured of a stream: key → what makes it, empty, for the module of a name."""
        definition = self.definition
        if definition is None:
            return {RANGE: self.build}
        made: dict[str, Callable[[str], Statistic]] = {RANGE: self._range_statistic}
        return {**made, COUNTS: self._value_counts} if definition.from_counts else made

    def _range_statistic(self, module_name: str) -> Statistic:
        definition, options = self.definition, self.options
        assert definition is not None
        search = definition.search
        statistic = definition.statistic(
            self.base_name,
            self.args,
            nonfinite=options.nonfinite,
            choice=None if search is None else SearchedRange(search, self.args, options),
            **{name: getattr(options, name) for name in definition.statistic.settings},
        )
        statistic.owner = self.label(module_name)
        return statistic

    def _value_counts(self, module_name: str) -> Statistic:
        statistic = ValueCounts(self.base_name, strategy_name(self.args))
        statistic.owner = self.label(module_name)
        return statistic

    def build(self, module_name: str = "") -> Observer:
        """Build the observer.

        :param module_name: what messages call the module of the tensor
        """
        observer: Observer = construct(self.kind, {"base_name": self.base_name, "args": self.args})
        observer.module_name = module_name
        return observer

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        how = self.args.model_dump_json(exclude={"observer", "observer_kwargs"})
        return self.base_name, self.kind, how, repr(sorted(self.options_given.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObserverSpec) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


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
