"""How a tensor is observed, resolved once: the class, its options, and what must be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from compressed_tensors.quantization import QuantizationArgs
from typing_extensions import Self

from calipers.numerics.layout import check_base_name, strategy_name
from calipers.numerics.library_versions import named_observer
from calipers.observers.base import Observer
from calipers.observers.compatibility import construct, constructor_parameters
from calipers.observers.definition import Definition, SearchedRange
from calipers.observers.options import ObserverOptions
from calipers.solvers.importance import Importance
from calipers.statistics.base import Statistic
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
