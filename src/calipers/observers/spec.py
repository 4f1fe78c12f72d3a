"""How a tensor is observed, resolved once: what must be measured, and how that is solved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import no_statistics
from calipers.numerics.layout import check_base_name, has_global_scale, strategy_name
from calipers.numerics.library_versions import named_observer
from calipers.numerics.qparams import qparams_of
from calipers.observers.base import Observer
from calipers.observers.compatibility import construct, parameters_of
from calipers.observers.definition import (
    Definition,
    QParamsDict,
    Range,
    SearchedRange,
    SolvedTensor,
    check_countable,
    usual_global_scale,
)
from calipers.observers.histogram import covered_range
from calipers.observers.options import ObserverOptions
from calipers.solvers.importance import Importance, ImportanceTarget
from calipers.solvers.scales import CountedValues, common_global_scale
from calipers.statistics.base import Statistic, full_precision
from calipers.statistics.ranges import LastRange, observation_of
from calipers.statistics.value_counts import ValueCounts

RANGE = "observer"
"""The key of the statistic of the range of activations, or of the observer that is one itself."""
COUNTS = "counts"
"""The key of the counts of all values."""


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
    :param definition: what is measured, and how that is solved
    :param is_adapted: whether the statistic and the solver are an object of the class instead
    """

    base_name: str
    args: QuantizationArgs
    kind: type[Observer]
    options: ObserverOptions
    importance: Importance
    definition: Definition
    is_adapted: bool

    @staticmethod
    def resolve(
        base_name: str, args: QuantizationArgs, *, allow_code: bool = False
    ) -> ObserverSpec | None:
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
        is_weight = base_name == "weight"
        definition: Definition | None = vars(kind).get("definition")
        if is_weight and definition is not None and definition.for_weights is not None:
            kind = definition.for_weights
            definition = kind.definition
        if is_weight and definition is not None:
            given = {key: value for key, value in given.items() if key not in definition.ignores}
        own = given.keys() & parameters_of(kind)  # a class may read options itself
        options = kind.checked_options(
            base_name, args, {key: value for key, value in given.items() if key not in own}
        )
        # Classes of ours can take tensors that they are not made for: weights whose values would
        # be counted, and activations under importance. They are adapted, too.
        is_adapted = definition is None or (
            definition.counts_values if is_weight else definition.is_of_weights
        )
        return ObserverSpec(
            base_name,
            args.model_copy(update={"observer_kwargs": given}, deep=True),
            kind,
            options,
            kind.importance_under(base_name, options),
            definition or Definition(),
            is_adapted,
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
        return self.kind.definition is not None and self.kind.definition.counts_values

    @property
    def takes_extrema(self) -> bool:
        """Whether the range of a tensor are its extrema, and nothing better is looked for."""
        return not self.is_adapted and not self.counts_values and self.definition.takes_extrema

    def label(self, module_name: str = "") -> str:
        """Return what messages call the observer of a tensor."""
        return self.kind.label_of(self.base_name, module_name)

    def build(self, module_name: str = "") -> Observer:
        """Build the observer.

        :param module_name: what messages call the module of the tensor
        """
        observer: Observer = construct(self.kind, {"base_name": self.base_name, "args": self.args})
        observer.module_name = module_name
        return observer

    @property
    def statistics(self) -> dict[str, Callable[[str], Statistic]]:
        """What is measured of a stream: key → what makes it, empty, for the module of a name."""
        if self.is_adapted:
            return {RANGE: self.build}
        if not self.definition.counts_values:
            return {RANGE: self._range_statistic}

        def value_counts(module_name: str) -> Statistic:
            statistic = ValueCounts(self.base_name, strategy_name(self.args))
            statistic.owner = self.label(module_name)
            return statistic

        return {RANGE: self._range_statistic, COUNTS: value_counts}

    def _range_statistic(self, module_name: str) -> Statistic:
        definition, options = self.definition, self.options
        choice = SearchedRange(definition, self.args, options)
        statistic = definition.statistic(
            self.base_name,
            self.args,
            nonfinite=options.nonfinite,
            choice=None if definition.takes_extrema else choice,
            **{name: getattr(options, name) for name in definition.statistic.settings},
        )
        statistic.owner = self.label(module_name)
        return statistic

    @torch.no_grad()
    def solve_stream(
        self, seen: Mapping[str, Statistic | None], module_name: str = ""
    ) -> QParamsDict | None:
        """Return the parameters of a tensor from its statistics; None where nothing was seen.

        :param seen: the statistics, by their keys
        """
        observer = seen.get(RANGE)
        if isinstance(observer, Observer):
            return observer.get_qparams() if observer.has_statistics else None
        result = self._from_statistics(seen, module_name)
        if result is None or isinstance(result, dict):
            return result
        with full_precision():
            args, label = self.args, self.label(module_name)
            global_scale = usual_global_scale([result], label) if has_global_scale(args) else None
            scale, zero_point = qparams_of(*result, args, global_scale, label)
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}

    @torch.no_grad()
    def range_of_stream(
        self, seen: Mapping[str, Statistic | None], module_name: str = ""
    ) -> Range | None:
        """Return the range that the parameters of a tensor are made from; None without data."""
        observer = seen.get(RANGE)
        if isinstance(observer, Observer):
            return observer.get_range() if observer.has_statistics else None
        result = self._from_statistics(seen, module_name)
        if result is None or not isinstance(result, dict):
            return result
        extrema = seen[RANGE]
        assert isinstance(extrema, LastRange)
        return covered_range(result, self.args, extrema.min_vals.shape)

    def _from_statistics(
        self, seen: Mapping[str, Statistic | None], module_name: str
    ) -> Range | QParamsDict | None:
        ranged, counts, definition = seen.get(RANGE), seen.get(COUNTS), self.definition
        ends = ranged.range() if isinstance(ranged, LastRange) else None
        solve = definition.qparams_from_counts or definition.range_from_counts
        if ends is None or not definition.counts_values:
            return ends
        if not isinstance(counts, ValueCounts) or not counts.fields():
            return ends  # the range was found elsewhere, as that of the peers of an unseen expert
        label = self.label(module_name)
        with full_precision():
            check_countable(*ends, ends[0].dtype, label)
            if solve is None:
                return ends
            counted = CountedValues(counts.distributions(), *ends, self.args, label)
            return solve(counted, self.options)

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        how = self.args.model_dump_json(exclude={"observer", "observer_kwargs"})
        return self.base_name, self.kind, how, repr(sorted(self.options_given.items()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObserverSpec) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class Weight(NamedTuple):
    """A weight, and what is known of the inputs of its module.

    :param has_warned: whether a warning has said already that importance cannot be used
    """

    spec: ObserverSpec
    value: Tensor
    inputs: Statistic | None
    module_name: str
    has_warned: bool = False

    def solve(self) -> SolvedTensor:
        """Find the range or the scales of the weight."""
        spec, label = self.spec, self.spec.label(self.module_name)
        definition, options = spec.definition, spec.options
        seen = observation_of(
            self.value, "weight", spec.args, nonfinite=options.nonfinite, label=lambda: label
        )
        if seen is None or (seen.extrema.nonfinite and seen.is_finite_nowhere):
            raise no_statistics(self.module_name)

        target = ImportanceTarget(seen.pieces, seen.layout, label)
        weights, _ = definition.weights(
            spec.importance, self.inputs, target, options, self.has_warned
        )
        low, high, solutions = definition.solve(
            seen.extrema, seen.pieces, spec.args, options, weights
        )
        if solutions is not None:
            solutions.label = label
            return SolvedTensor(low, high, solutions)
        dtype = seen.pieces.dtype
        return SolvedTensor(low.to(dtype), high.to(dtype))


@torch.no_grad()
def solve_weights(weights: Sequence[Weight]) -> list[QParamsDict]:
    """Return the parameters of weights; several share one global scale (TENSOR_GROUP)."""
    with full_precision():
        if any(weight.spec.is_adapted for weight in weights):
            return _observe_weights(weights)
        group = [weight.solve() for weight in weights]
        results: list[QParamsDict] = []
        for weight, solved in zip(weights, group, strict=True):
            args, label = weight.spec.args, weight.spec.label(weight.module_name)
            global_scale = None
            if has_global_scale(args):
                ranges = [(each.low, each.high) for each in (solved, *group)]
                global_scale = usual_global_scale(ranges, label)
                choosing = [each.solutions for each in group if each.solutions is not None]
                if len(choosing) == len(group):
                    global_scale = common_global_scale(choosing, global_scale)
            if solved.solutions is not None:
                scale, zero_point, _ = solved.solutions.under(global_scale)
            else:
                scale, zero_point = qparams_of(solved.low, solved.high, args, global_scale, label)
            results.append({"scale": scale, "zero_point": zero_point, "global_scale": global_scale})
        return results


def _observe_weights(weights: Sequence[Weight]) -> list[QParamsDict]:
    """Show weights to observers, which share their global scale themselves."""
    observers = [weight.spec.build(weight.module_name) for weight in weights]
    if len(observers) > 1:
        Observer.fuse(observers)
    for weight, observer in zip(weights, observers, strict=True):
        observer.gathering.has_warned = weight.has_warned
        observer.inputs = weight.inputs
        observer(weight.value)
    return [observer.get_qparams() for observer in observers]
