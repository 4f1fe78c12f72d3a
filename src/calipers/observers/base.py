"""The base class of all observers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from compressed_tensors import InternalModule
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from torch import distributed as dist
from typing_extensions import Self

from calipers.errors import (
    ConfigurationError,
    NoStatisticsError,
    UnsuitableError,
    listing,
    no_statistics,
    not_finite,
)
from calipers.kernels.reductions import Extrema, extrema
from calipers.numerics.formats import Format
from calipers.numerics.layout import Layout, has_global_scale, strategy_name
from calipers.numerics.qparams import qparams_of
from calipers.observers.compatibility import (
    ALIASES,
    base_name_and_args,
    calculated_fields,
    construct,
    declared_fields,
)
from calipers.observers.definition import (
    Definition,
    QParamsDict,
    check_countable,
    usual_global_scale,
)
from calipers.observers.inputs import InputGathering
from calipers.observers.options import ObserverOptions, parse_options
from calipers.observers.registry import class_in_file, is_file_of_code, observer_registry
from calipers.registry import Registry
from calipers.solvers.importance import Importance, ImportanceTarget, importance_named
from calipers.solvers.scales import Solutions
from calipers.statistics import ranges
from calipers.statistics.base import Lock, Reduction, Statistic, guarded
from calipers.statistics.distributed import sync_statistics
from calipers.statistics.module import StatisticModule
from calipers.statistics.ranges import LastRange, Observation, observation_of
from calipers.statistics.value_counts import ValueCounts

C = TypeVar("C", bound=type)
Update = TypeVar("Update", bound=Callable[..., None])


def in_pieces(update: Update) -> Update:
    """Mark an ``update_statistics_from_observed`` that asks only ``extrema`` and ``pieces``.

    It is handed the pieces themselves, and no canonical view is made, which may cost a copy.
    A subclass that overrides it gets the canonical view again, and may pass it on.
    """
    update.in_pieces = update  # type: ignore[attr-defined]
    return update


class OptionAttribute:
    """An option as an attribute of observers; to set it checks all options again.

    It is any other attribute of an object that has no such option: its class may have options of
    its own in place of those of its base.
    """

    def __init__(self, option: str, name: str = "") -> None:
        self.option, self.name = option, name or option

    def _is_option(self, observer: Observer) -> bool:
        options = observer.__dict__.get("options")
        return options is not None and self.option in type(options).model_fields

    def __get__(self, observer: Observer | None, owner: type) -> Any:
        if observer is None:
            return self
        if self._is_option(observer):
            return getattr(observer.options, self.option)
        if self.name in observer.__dict__:
            return observer.__dict__[self.name]
        raise AttributeError(f"{owner.__qualname__!r} has no attribute {self.name!r}")

    def __set__(self, observer: Observer, value: Any) -> None:
        if self._is_option(observer):
            observer.set_option(self.option, value)
        else:
            observer.__dict__[self.name] = value


class Observer(StatisticModule, InternalModule):  # type: ignore[misc]
    """Watches tensors and works out the parameters to quantize them with.

    A subclass sets ``min_vals`` and ``max_vals`` in ``update_statistics_from_observed``; that is
    all it must do. It may say what is kept of them (``Range``, or ``reductions`` of single fields)
    and which options it has (``Options``; a class that declares none takes any, from
    ``self.args.observer_kwargs``). The first line of its docstring, ``remembers`` and ``when`` tell
    people about it.

    :param base_name: what is observed: ``weight``, ``input``, ``output``, ``q``, ``k`` or ``v``
    :param args: how it will be quantized; never changed
    :param quantization_args: what the first generation of the API calls ``args``
    :param observer_kwargs: options; they win over ``args.observer_kwargs``

    >>> args = QuantizationArgs(num_bits=4, strategy="group", group_size=2)
    >>> observer = Observer.load_from_registry("minmax", base_name="weight", args=args)
    >>> observer(torch.tensor([[-7.5, 1.0, 0.0, 15.0]])).get_qparams()["scale"]
    tensor([[1., 2.]])
    """

    parts = ("range_statistic", "counts", "inputs")
    tokens_field = "observed_tokens"
    num_observed_tokens = Statistic.num_tokens
    """How many tokens were observed; 0 for weights."""

    registry: ClassVar[Registry[Any]]
    Options: ClassVar[type[ObserverOptions] | None] = None
    """Its options; a class that declares none takes any."""
    Range: ClassVar[type[LastRange]] = LastRange
    definition: ClassVar[Definition | None] = None
    """What the class does, as pure functions: engines need no object of a class that has its own,
    but show tensors to objects of a subclass that has none."""
    gathers_inputs: ClassVar[bool] = False
    usual_importance: ClassVar[str] = "none"
    """How the errors of a weight count, unless an option ``importance`` says otherwise."""
    remembers: ClassVar[str] = ""
    when: ClassVar[str] = ""

    options: ObserverOptions
    nonfinite = OptionAttribute("nonfinite")
    module_name: str = ""
    range_statistic: LastRange
    counts: ValueCounts | None = None
    """The counts of an observer that counts values."""
    inputs: Statistic | None = None
    """What is known of the inputs of the module of a weight, if errors are weighed by it;
    ``gathering`` is how that comes to be known."""
    gathering: InputGathering

    min_vals: Tensor
    max_vals: Tensor
    _solutions: Solutions | None = None  # of the last weight, where its scales are chosen
    _observation: Observation | None = None  # what it is being shown
    _scale: Tensor  # of the first generation
    _zero_point: Tensor

    def __init__(
        self,
        base_name: str = "weight",
        args: QuantizationArgs | None = None,
        *,
        quantization_args: QuantizationArgs | None = None,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        name = self.registered_name()
        base_name, args = base_name_and_args(name, base_name, args, quantization_args)
        given = {**(args.observer_kwargs or {}), **observer_kwargs}
        options = self.checked_options(base_name, args, given)
        self.base_name = base_name
        self.args = args.model_copy(update={"observer_kwargs": given}, deep=True)
        self.quantization_args = self.args
        self._fused_observers: set[Observer] = set()
        self.range_statistic = self.Range()
        if self.definition is not None and self.definition.counts_values:
            self.counts = ValueCounts(self.base_name, strategy_name(self.args))
        self.options = options
        self.gathering = InputGathering(self)
        self._apply_options()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the class keep what its definition says."""
        super().__init_subclass__(**kwargs)
        definition = vars(cls).get("definition")
        if definition is not None:
            cls.Range = definition.statistic
        for name in cls.Options.model_fields if cls.Options is not None else ():
            for attribute in (name, *(a for a, option in ALIASES.items() if option == name)):
                if not hasattr(cls, attribute):
                    setattr(cls, attribute, OptionAttribute(name, attribute))

    @classmethod
    def kept(cls) -> Mapping[str, Reduction]:
        """Return what is kept of a tensor, and how two of them become one."""
        return {**cls.Range.all_reductions(), **cls.all_reductions()}

    # Its statistics

    @classmethod
    def all_reductions(cls) -> dict[str, Reduction]:
        """Collect the fields that classes declare; the first generation keeps its results, too."""
        return declared_fields(cls, keeps_results=not cls.writes_update())

    @classmethod
    def writes_update(cls) -> bool:
        """Whether a class is of the current generation: it has a definition, or its own update."""
        return cls.definition is not None or not cls._updates_as_defined()

    @classmethod
    def _updates_as_defined(cls) -> bool:
        return cls.update_statistics_from_observed is Observer.update_statistics_from_observed

    def set_option(self, name: str, value: Any) -> None:
        """Change one option; all of them are checked."""
        options = {**self.options.model_dump(), name: value}
        self.options = parse_options(type(self.options), options, self.registered_name())
        self._apply_options()

    def _apply_options(self) -> None:
        for name in self.range_statistic.settings:
            setattr(self.range_statistic, name, getattr(self.options, name))
        self.gathering.use(self.importance_under(self.base_name, self.options))

    # Observing

    @guarded
    def forward(
        self, observed: Tensor, g_idx: Tensor | None = None, mask: Tensor | None = None
    ) -> Self:
        """Take a tensor into the statistics; an empty one changes nothing.

        :param observed: the tensor, in the shape it has in the model
        :param g_idx: for grouped weights, the group of each column; with ``-1`` in it, ignored
        :param mask: for activations and attention states, which tokens count
        :return: the observer itself, which unpacks into scale and zero point
        """
        seen = observation_of(
            observed,
            self.base_name,
            self.args,
            g_idx=g_idx,
            mask=mask,
            nonfinite=self.options.nonfinite,
            label=self.label,
        )
        if seen is None:
            return self
        if seen.extrema.nonfinite and seen.is_finite_nowhere:
            self.absorb(**seen.left_out())
            return self
        if seen.extrema.nonfinite and self.has_statistics:
            seen = seen.without_missing(self.min_vals, self.max_vals)
        if not self._update_takes_pieces():
            seen = seen._replace(observed=seen.canonical_view())
        self.__dict__["_observation"] = seen  # setting an attribute of a module costs more
        try:
            self.update_statistics_from_observed(seen.observed)
        finally:
            self.__dict__["_observation"] = None
        self._absorb(seen.marks())
        return self

    @in_pieces
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Set ``min_vals`` and ``max_vals`` from a canonical view. Subclasses write this.

        :param observed: shape ``(observations, *qparam_shape, group)``
        """
        low, high = self.extrema(observed)
        definition = self.definition
        if definition is None:  # a class of the first generation
            has_global = has_global_scale(self.args)
            global_scale = usual_global_scale([(low, high)], self.label()) if has_global else None
            results = calculated_fields(self.calculate_qparams, observed, global_scale)
            self.absorb(min_vals=low, max_vals=high, **results)
            return
        pieces, shown, gathering = self.pieces(observed), self._observation, self.gathering
        if self.counts is not None:
            check_countable(low, high, pieces.dtype, self.label(), ". Nothing was recorded")
        if not definition.takes_extrema:
            seen = Extrema(low, high, 0, shown.extrema.missing if shown else None)
            layout = shown.layout if shown else Layout.of(self.base_name, self.args)
            target = ImportanceTarget(pieces, layout, self.label())
            weights, gathering.has_warned = definition.weights(
                gathering.importance, self.inputs, target, self.options, gathering.has_warned
            )
            low, high, self._solutions = definition.solve(
                seen, pieces, self.args, self.options, weights
            )
        self._absorb({"min_vals": low, "max_vals": high})
        if self.counts is not None:
            self.counts.count(pieces, shown.tokens if shown else 0)

    def calculate_qparams(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return scale and zero point. What a subclass of the first generation writes instead."""
        raise NotImplementedError(
            f"{type(self).__qualname__} must implement update_statistics_from_observed(observed), "
            "or calculate_qparams(observed) as in the first generation of the API."
        )

    def extrema(self, observed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value of each piece.

        Within ``update_statistics_from_observed`` they are already at hand.
        """
        if self._observation is not None and observed is self._observation.observed:
            result = self._observation.extrema
        else:
            result = extrema(observed.unsqueeze(-2))
            if result.nonfinite:
                raise not_finite(self.label(), result.nonfinite, observed.numel(), observed.shape)
        return result.min_vals, result.max_vals

    def pieces(self, observed: Tensor) -> Tensor:
        """Return what kernels take: the tensor being observed, or a canonical view, in pieces."""
        if self._observation is not None and observed is self._observation.observed:
            return self._observation.pieces
        return observed.unsqueeze(-2)

    @classmethod
    def _update_takes_pieces(cls) -> bool:
        """Whether the update is marked itself, and the methods it asks are our own."""
        if cls.extrema is not Observer.extrema or cls.pieces is not Observer.pieces:
            return False
        update = cls.update_statistics_from_observed
        # A mark that functools.wraps copied does not count.
        return cls.writes_update() and getattr(update, "in_pieces", None) is update

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in a tensor, as every statistic does: see ``forward``."""
        self(x, mask=mask)

    def derive_from(self, known: Collection[Statistic]) -> bool:
        """Know what statistics of the same tensor tell of it; False where that is not enough.

        It is where ranges are those of all data, found by nothing but looking at all values.
        """
        extrema = ranges.Extrema(self.base_name, self.args, nonfinite=self.options.nonfinite)
        counts = None if self.counts is None else copy.deepcopy(self.counts)
        takes_extrema = self.definition is not None and self.definition.takes_extrema
        has_all = self.declared()["min_vals"] is Reduction.MIN  # a moving average has not
        if not (takes_extrema and has_all and self._updates_as_defined()):
            return False
        if not extrema.derive_from(known):
            return False
        if counts is not None and not counts.derive_from(known):
            return False
        self.load_fields(extrema.fields())
        if self.counts is not None and counts is not None:
            self.counts.copy_from(counts)
        return True

    # Results

    @property
    def has_statistics(self) -> bool:
        """Whether anything was observed."""
        return all(isinstance(getattr(self, e, None), Tensor) for e in ("min_vals", "max_vals"))

    @guarded
    def get_statistics(self) -> dict[str, Tensor]:
        """Return everything the observer remembers, by name; further data does not change it."""
        if not self.has_statistics:
            raise no_statistics(self.module_name)
        fields = self.fields_to_share()
        return {k: v for k, v in fields.items() if not k.startswith("observed_")}

    @guarded
    def get_range(self) -> tuple[Tensor, Tensor]:
        """Return the range of each piece that the parameters are made from.

        It has the dtype of what was observed, even if the statistics are kept in a wider one.
        """
        if not self.has_statistics:
            raise no_statistics(self.module_name)
        low, high = self.min_vals, self.max_vals
        dtype = getattr(self, "observed_like", low).dtype
        return low.to(dtype), high.to(dtype)

    @torch.no_grad()
    @guarded
    def get_qparams(self) -> QParamsDict:
        """Work out the parameters from what was observed; changes nothing."""
        low, high = self.get_range()
        global_scale = self.get_global_scale()
        if self.writes_update():
            scale, zero_point = qparams_of(low, high, self.args, global_scale, self.label())
        elif global_scale is not None and self._fused_observers:
            raise ConfigurationError(
                f"{self.label()} works out its scale alone (calculate_qparams) and cannot "
                "share a global_scale. Implement update_statistics_from_observed instead."
            )
        else:
            scale, zero_point = self._scale.clone(), self._zero_point.clone()
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}

    def __iter__(self) -> Iterator[Tensor]:
        """Unpack into scale and zero point, as the first generation did."""
        qparams = self.get_qparams()
        return iter((qparams["scale"], qparams["zero_point"]))

    @torch.no_grad()
    @guarded
    def get_global_scale(self) -> Tensor | None:
        """Return the scale of the local scales, common to all fused observers (TENSOR_GROUP)."""
        if not has_global_scale(self.args):
            return None
        missing = [other.label() for other in self._fused_observers if not other.has_statistics]
        if missing:
            raise NoStatisticsError(
                "shares its global_scale with observers that have no statistics: "
                f"{listing(sorted(missing))}",
                subject=self.label(),
                hint="Call each of them on its tensor before get_qparams() on any",
            )
        fused = (self, *self._fused_observers)
        return usual_global_scale([each.get_range() for each in fused], self.label())

    @property
    def num_nonfinite(self) -> int:
        """How many values were left out for being NaN or Inf."""
        return int(getattr(self, "observed_nonfinite", 0))

    @staticmethod
    def fuse(observers: Iterable[Observer]) -> None:
        """Make observers share one global scale (TENSOR_GROUP)."""
        group = set(observers)
        for observer in list(group):
            group |= observer._fused_observers
        lock = Lock()  # in common: each asks the others for their ranges
        for observer in group:
            observer._fused_observers = group - {observer}
            observer.share_lock(lock)

    def attach(self, module: torch.nn.Module) -> None:
        """Take over the sums of inputs that were left on a module, or start summing them.

        Nothing happens where the observer has no use for them, or there are no ``in_features``.
        """
        self.gathering.attach(module)

    def detach(self, module: torch.nn.Module) -> None:
        """Stop summing, and leave the sums on ``module``."""
        self.gathering.detach(module)

    def sync_activation_stats(self) -> list[dist.Work]:
        """Start reducing the statistics over all ranks; wait for what is returned.

        An observer that remembers only its last value has nothing to share.
        """
        kept = {k: how for k, how in self.declared().items() if not k.startswith("observed_")}
        return sync_statistics([self]) if any(how.is_synced for how in kept.values()) else []

    # By name

    @classmethod
    def register(
        cls, name: str | None = None, alias: str | Iterable[str] | None = None
    ) -> Callable[[C], C]:
        """Return a decorator that makes a subclass known by a name."""
        return cls.registry.register(name, alias)

    @classmethod
    def register_value(
        cls, value: type, name: str | None = None, alias: str | Iterable[str] | None = None
    ) -> None:
        """Make a subclass known by a name."""
        cls.registry.add(value, name, alias)

    @classmethod
    def get_value_from_registry(cls, name: str, *, allow_code: bool = True) -> type[Self]:
        """Return the class of that name, or the one in ``path/to/file.py:Class``.

        :param allow_code: whether such a file may run; pass False for a name that comes from data
        """
        kind: type[Self]
        if isinstance(name, str) and is_file_of_code(name):
            kind = class_in_file(name, Observer, allow_code)
        else:
            kind = cls.registry.get(name)
        return kind

    @classmethod
    def load_from_registry(
        cls, name: str, *, allow_code: bool = True, **constructor_kwargs: Any
    ) -> Self:
        """Build an object by name; ``allow_code`` as for :meth:`get_value_from_registry`."""
        kind = cls.get_value_from_registry(name, allow_code=allow_code)
        observer: Self = construct(kind, constructor_kwargs)
        return observer

    @classmethod
    def registered_names(cls) -> list[str]:
        """Return the names of all subclasses, sorted."""
        return sorted(cls.registry.names())

    @classmethod
    def registered_aliases(cls) -> list[str]:
        """Return the other names they go by, sorted."""
        return sorted(cls.registry.aliases())

    @classmethod
    def registered_name(cls) -> str:
        """Return the name of this class; of one that is not registered, that of its definition."""
        return cls.registry.name_of(cls) or cls.__name__

    @classmethod
    def label_of(cls, base_name: str, module_name: str = "") -> str:
        """Return how messages call an observer of this class."""
        of = f" of {module_name}" if module_name else ""
        return f"Observer '{cls.registered_name()}' ({base_name}{of})"

    # By options

    @classmethod
    def checked_options(
        cls, base_name: str, args: QuantizationArgs, given: Mapping[str, Any]
    ) -> ObserverOptions:
        """Return the options; refuse them, or a tensor that the observer is not made for."""
        fmt = Format.of(args)  # refuses what does not exist
        if cls.Options is None:
            given = {key: given[key] for key in given if key in ObserverOptions.model_fields}
        options = parse_options(cls.Options or ObserverOptions, given, cls.registered_name())
        cls.check(base_name, args, options, fmt)
        return options

    @classmethod
    def check(
        cls, base_name: str, args: QuantizationArgs, options: ObserverOptions, fmt: Format
    ) -> None:
        """Refuse what the observer is not made for, by an ``UnsuitableError``."""

    @classmethod
    def suits(cls, base_name: str, args: QuantizationArgs) -> bool:
        """Whether the observer is made for such a tensor, with its options as they are at first."""
        if cls.gathers_inputs and base_name != "weight":
            return False
        try:
            cls.checked_options(base_name, args, {})
        except UnsuitableError:
            return False
        return True

    @classmethod
    def importance_under(cls, base_name: str, options: ObserverOptions) -> Importance:
        """Return how errors count under some options."""
        chosen = getattr(options, "importance", cls.usual_importance)
        return importance_named(chosen if base_name == "weight" else "none", options.nonfinite)

    # Configuration

    def configuration(self) -> dict[str, Any]:
        """Return what two observers must have in common to be merged."""
        args = json.loads(self.args.model_dump_json(exclude={"observer", "observer_kwargs"}))
        options = self.options.model_dump() if self.Options else self.args.observer_kwargs
        options = json.loads(json.dumps(options, default=str))
        return {
            "observer": self.registered_name(),
            "base_name": self.base_name,
            **{f"args.{key}": value for key, value in args.items()},
            **{f"options.{key}": value for key, value in options.items()},
        }

    def label(self) -> str:
        """Return how messages call this observer."""
        return self.label_of(self.base_name, self.module_name)

    def extra_repr(self) -> str:
        """Describe the observer in a printed model."""
        settings = ", ".join(f"{k}={v}" for k, v in self.options.model_dump().items())
        fmt, cut = Format.of(self.args), strategy_name(self.args)
        return f"{self.base_name}, {fmt.name} per {cut}, {settings}"


Observer.registry = observer_registry(Observer)
