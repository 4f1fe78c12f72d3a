"""The base class of all observers."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from compressed_tensors import InternalModule
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor
from torch import distributed as dist
from typing_extensions import Self

from calipers.errors import (
    NoStatisticsError,
    listing,
    no_statistics,
)
from calipers.numerics.formats import Format
from calipers.numerics.layout import Layout, has_global_scale, strategy_name
from calipers.numerics.qparams import global_scale_of, qparams_of
from calipers.observers.compatibility import OlderGenerations, base_name_and_args
from calipers.observers.declaration import ObserverDeclaration
from calipers.observers.definition import QParamsDict, absmax, weights_or_none
from calipers.observers.inputs import InputGathering
from calipers.observers.options import ObserverOptions
from calipers.observers.pieces import ObservedPieces
from calipers.observers.registry import observer_registry
from calipers.registry import Registry
from calipers.solvers.exact import Solutions
from calipers.solvers.importance import Weighed, Weights
from calipers.statistics.base import Reduction, Statistic
from calipers.statistics.locking import Lock, guarded
from calipers.statistics.observation import observation_of
from calipers.statistics.ranges import Extrema, LastRange
from calipers.statistics.sync import sync_statistics
from calipers.statistics.value_counts import ValueCounts


class Observer(
    ObserverDeclaration,
    OlderGenerations,
    ObservedPieces,
    InputGathering,
    InternalModule,  # type: ignore[misc]
):
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

    registry: ClassVar[Registry[type[Observer]]]
    parts = ("range_statistic", "counts", "inputs")

    options: ObserverOptions
    module_name: str = ""
    range_statistic: LastRange
    counts: ValueCounts | None = None
    """The counts of an observer that counts values."""

    min_vals: Tensor
    max_vals: Tensor
    observed_tokens: Tensor
    observed_nonfinite: Tensor
    observed_like: Tensor

    _has_warned = False

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
        self._add_counts()
        self.options = options
        self.apply_options()

    @classmethod
    def kept(cls) -> Mapping[str, Reduction]:
        """Return what is kept of a tensor, and how two of them become one."""
        return {**cls.Range.all_reductions(), **cls.all_reductions()}

    # Its statistics

    def _add_counts(self) -> None:
        if self.counts_values:
            self.counts = ValueCounts(self.base_name, strategy_name(self.args))

    def apply_options(self) -> None:
        """Tell the statistics the options that concern them; what they know stays."""
        for name in self.range_statistic.settings:
            setattr(self.range_statistic, name, getattr(self.options, name))
        self.weigh_by(self.importance_under(self.base_name, self.options))

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
            self._absorb(seen.left_out())
            return self
        if seen.extrema.nonfinite and self.has_statistics:
            seen = seen.without_missing(self.min_vals, self.max_vals)
        if not self._takes_pieces():
            seen = seen._replace(observed=seen.canonical_view())
        self.__dict__["_observation"] = seen  # setting an attribute of a module costs more
        try:
            self.update_statistics_from_observed(seen.observed)
        finally:
            self.__dict__["_observation"] = None
        self._absorb(seen.marks())
        return self

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in a tensor, as every statistic does: see ``forward``."""
        self(x, mask=mask)

    def derive_from(self, known: Iterable[Statistic]) -> bool:
        """Know what statistics of the same tensor tell of it; False where that is not enough.

        It is where ranges are those of all data, found by nothing but looking at all values.
        """
        extrema = Extrema(self.base_name, self.args, nonfinite=self.options.nonfinite)
        counts = None if self.counts is None else copy.deepcopy(self.counts)
        known = list(known)
        has_all = self.keeps_extrema() and self.kept()["min_vals"] is Reduction.MIN
        if not has_all or not extrema.derive_from(known):
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
        found = self.calculated_qparams(global_scale is not None and bool(self._fused_observers))
        scale, zero_point = found or qparams_of(low, high, self.args, global_scale, self.label())
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}

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
        largest = absmax(*self.get_range())
        for other in self._fused_observers:
            largest = torch.maximum(largest, absmax(*other.get_range()).to(largest.device))
        return global_scale_of(largest, self.label())

    def solutions(self) -> Solutions:
        """Return the best parameters under any global scale, where the class chooses among them."""
        raise NotImplementedError

    @property
    def num_observed_tokens(self) -> int:
        """How many tokens were observed; 0 for weights."""
        return int(getattr(self, "observed_tokens", 0))

    @property
    def num_tokens(self) -> int:
        """How many tokens were taken in, as every statistic tells it."""
        return self.num_observed_tokens

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

    @property
    def fused_with(self) -> frozenset[Observer]:
        """The others that share its global scale."""
        return frozenset(self._fused_observers)

    # Importance

    def weights(self, pieces: Tensor, least: float = 0.0) -> Weights:
        """Return what the errors of the weight that is being observed are weighed by.

        Where that cannot be, all errors count alike and one warning says so; or it is an error, if
        the options say ``strict``.

        :param least: the least that a column counts, where the mean is 1
        """
        weights, self._has_warned = weights_or_none(
            partial(self.possible_weights, pieces, least),
            is_strict=getattr(self.options, "strict", False),
            is_told=self._has_warned,
        )
        return weights

    def possible_weights(self, pieces: Tensor, least: float = 0.0) -> Weights:
        """Return what errors are weighed by; raise where that cannot be."""
        if not self.weighing.fields:
            return Weights()
        seen = self._observation
        layout = Layout.of(self.base_name, self.args) if seen is None else seen.layout
        return self.weighing.weights(self.inputs, Weighed(pieces, layout, self.label(), least))

    def fall_back_silently(self) -> None:
        """Let importance that cannot be used be no news: somebody has told of it."""
        self._has_warned = True

    # Over ranks

    def sync_activation_stats(self) -> list[dist.Work]:
        """Start reducing the statistics over all ranks; wait for what is returned.

        An observer that remembers only its last value has nothing to share.
        """
        kept = {k: how for k, how in self.declared().items() if not k.startswith("observed_")}
        return sync_statistics([self]) if any(how.is_synced for how in kept.values()) else []

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
