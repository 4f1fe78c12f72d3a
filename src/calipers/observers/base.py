"""The base class of all observers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, TypedDict

import torch
from compressed_tensors import InternalModule
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import Tensor
from torch import distributed as dist
from typing_extensions import Self

from calipers.errors import (
    ComplexTensorError,
    ConfigurationError,
    FusedStatisticsError,
    LayoutError,
    NonFiniteError,
    NoStatisticsError,
)
from calipers.kernels.extrema import Extrema, extrema
from calipers.numerics.formats import Format
from calipers.numerics.layout import Layout, check_base_name, strategy_name
from calipers.numerics.qparams import global_scale_of, qparams_of
from calipers.observers.first_generation import calculate_by_piece
from calipers.observers.observation import Observation, takes_pieces
from calipers.observers.options import ObserverOptions, OptionAttributes, parse_options
from calipers.observers.registry import Registered, Registry
from calipers.statistics.base import Reduction
from calipers.statistics.guarding import Lock, guarded
from calipers.statistics.module import StatisticModule
from calipers.statistics.sync import sync_statistics


class QParamsDict(TypedDict):
    """The parameters a tensor is quantized with."""

    scale: Tensor
    zero_point: Tensor
    global_scale: Tensor | None


class Observer(Registered, OptionAttributes, StatisticModule, InternalModule):  # type: ignore[misc]
    """Watches tensors and works out the parameters to quantize them with.

    A subclass sets ``min_vals`` and ``max_vals`` in ``update_statistics_from_observed``; that is
    all it must do. It may declare what its fields remember (``reductions``) and which options it
    has (``Options``; a class that declares none takes any, from ``self.args.observer_kwargs``).
    The first line of its docstring, ``remembers`` and ``when`` tell people about it.

    :param base_name: what is observed: ``weight``, ``input``, ``output``, ``q``, ``k`` or ``v``
    :param args: how it will be quantized; never changed
    :param quantization_args: what the first generation of the API calls ``args``
    :param observer_kwargs: options; they win over ``args.observer_kwargs``

    >>> args = QuantizationArgs(num_bits=4, strategy="group", group_size=2)
    >>> observer = Observer.load_from_registry("minmax", base_name="weight", args=args)
    >>> observer(torch.tensor([[-7.5, 1.0, 0.0, 15.0]])).get_qparams()["scale"]
    tensor([[1., 2.]])
    """

    registry: ClassVar[Registry[Observer]]
    Options: ClassVar[type[ObserverOptions] | None] = None
    remembers: ClassVar[str] = ""
    when: ClassVar[str] = ""
    reductions: ClassVar[Mapping[str, Reduction]] = {
        "min_vals": Reduction.LAST,
        "max_vals": Reduction.LAST,
        "observed_tokens": Reduction.SUM,
        "observed_nonfinite": Reduction.SUM,
        "observed_like": Reduction.SUM,
    }

    options: ObserverOptions
    min_vals: Tensor
    max_vals: Tensor
    observed_tokens: Tensor
    observed_nonfinite: Tensor
    observed_like: Tensor  # no elements, only the dtype; adding two of them promotes it

    def __init__(
        self,
        base_name: str = "weight",
        args: QuantizationArgs | None = None,
        *,
        quantization_args: QuantizationArgs | None = None,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        if isinstance(base_name, QuantizationArgs):
            if args is not None:
                raise ConfigurationError(
                    f"Observer '{self.registered_name()}' takes one QuantizationArgs; give its "
                    "options by keyword."
                )
            base_name, args = "weight", base_name
        check_base_name(base_name)
        both = [given for given in (args, quantization_args) if given is not None]
        if len(both) != 1 or not isinstance(both[0], QuantizationArgs):
            raise ConfigurationError(
                f"Observer '{self.registered_name()}' needs QuantizationArgs, given once: "
                "as args (or, in code of the first generation, as quantization_args)."
            )
        args = both[0]
        Format.of(args)  # refuses what does not exist
        given = {**(args.observer_kwargs or {}), **observer_kwargs}
        self.base_name = base_name
        self.module_name = ""
        self.args = args.model_copy(update={"observer_kwargs": given}, deep=True)
        self.quantization_args = self.args
        self.options = self._parse_options(given)
        self._fused_observers: set[Observer] = set()
        self._observation: Observation | None = None

    @classmethod
    def all_reductions(cls) -> dict[str, Reduction]:
        """Collect the declared fields; a class of the first generation also keeps its results."""
        declared = super().all_reductions()
        if cls.update_statistics_from_observed is Observer.update_statistics_from_observed:
            declared |= {"_scale": Reduction.LAST, "_zero_point": Reduction.LAST}
        return declared

    # Observing

    @torch.no_grad()
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
        if observed.numel() == 0:
            return self
        if observed.is_complex():
            raise ComplexTensorError(self.label(), observed.dtype)
        try:
            layout = Layout.of(self.base_name, self.args, g_idx)
            if mask is not None:
                observed = layout.select_tokens(observed, mask)
                if observed.numel() == 0:
                    return self
            pieces = layout.pieces(_as_float(observed))
        except LayoutError as error:
            error.args = (f"{self.label()}: {error}",)
            raise
        found = extrema(pieces)
        if found.nonfinite:
            if self.options.nonfinite == "raise":
                raise self._nonfinite_error(found, observed)
            if found.nonfinite == pieces.numel():
                self.absorb(observed_nonfinite=torch.tensor(found.nonfinite, device=pieces.device))
                return self
            found = self._without_missing(found)
        handed = pieces
        if not self._takes_pieces():
            handed = pieces.flatten(-2)
            if found.nonfinite:
                # Zero is in every range and quantizes without error: it adds nothing to a result.
                handed = handed.nan_to_num(0.0, 0.0, 0.0)
        self._observation = Observation(handed, pieces, layout, found)
        try:
            self.update_statistics_from_observed(handed)
        finally:
            self._observation = None
        self.absorb(
            observed_tokens=torch.tensor(layout.tokens(observed), device=pieces.device),
            observed_nonfinite=torch.tensor(found.nonfinite, device=pieces.device),
            observed_like=pieces.new_empty(0),
        )
        return self

    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Set ``min_vals`` and ``max_vals`` from a canonical view. Subclasses write this.

        :param observed: shape ``(observations, *qparam_shape, group)``
        """
        low, high = self.extrema(observed)
        global_scale = None
        if self.args.strategy == QuantizationStrategy.TENSOR_GROUP:
            global_scale = global_scale_of(_absmax(low, high))
        scale, zero_point = calculate_by_piece(self.calculate_qparams, observed, global_scale)
        self.absorb(min_vals=low, max_vals=high, _scale=scale, _zero_point=zero_point)

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
            found = self._observation.extrema
        else:
            found = extrema(observed.unsqueeze(-2))
            if found.nonfinite:
                raise self._nonfinite_error(found, observed)
        return found.min_vals, found.max_vals

    def pieces(self, observed: Tensor) -> Tensor:
        """Return what kernels take: the tensor being observed, or a canonical view, in pieces."""
        if self._observation is not None and observed is self._observation.observed:
            return self._observation.pieces
        return observed.unsqueeze(-2)

    def _takes_pieces(self) -> bool:
        """Whether the update is marked itself, and the methods it asks are our own."""
        own = type(self)
        ours = own.extrema is Observer.extrema and own.pieces is Observer.pieces
        return ours and takes_pieces(own.update_statistics_from_observed)

    def _nonfinite_error(self, found: Extrema, observed: Tensor) -> NonFiniteError:
        return NonFiniteError(self.label(), found.nonfinite, observed.numel(), observed.shape)

    def _without_missing(self, found: Extrema) -> Extrema:
        """Let pieces without any finite value stay as they were."""
        if found.missing is None or not self.has_statistics:
            return found
        low, high = (v.to(found.min_vals) for v in (self.min_vals, self.max_vals))
        if low.shape != found.min_vals.shape:
            return found
        low = torch.where(found.missing, low, found.min_vals)
        return found._replace(
            min_vals=low, max_vals=torch.where(found.missing, high, found.max_vals)
        )

    # Results

    @property
    def has_statistics(self) -> bool:
        """Whether anything was observed."""
        return {"min_vals", "max_vals"} <= self.fields().keys()

    @guarded
    def get_statistics(self) -> dict[str, Tensor]:
        """Return everything the observer remembers, by name."""
        if not self.has_statistics:
            raise NoStatisticsError(self.module_name)
        return {k: v for k, v in self.fields().items() if not k.startswith("observed_")}

    @guarded
    def get_range(self) -> tuple[Tensor, Tensor]:
        """Return the range of each piece that the parameters are made from.

        It has the dtype of what was observed, even if the statistics are kept in a wider one.
        """
        if not self.has_statistics:
            raise NoStatisticsError(self.module_name)
        dtype = self.observed_like.dtype if hasattr(self, "observed_like") else self.min_vals.dtype
        return self.min_vals.to(dtype), self.max_vals.to(dtype)

    @torch.no_grad()
    @guarded
    def get_qparams(self) -> QParamsDict:
        """Work out the parameters from what was observed; changes nothing."""
        low, high = self.get_range()
        global_scale = self.get_global_scale()
        if "_scale" in self.fields():
            if global_scale is not None and self._fused_observers:
                raise ConfigurationError(
                    f"{self.label()} works out its scale alone (calculate_qparams) and cannot "
                    "share a global_scale. Implement update_statistics_from_observed instead."
                )
            scale, zero_point = self._scale.clone(), self._zero_point.clone()
        else:
            scale, zero_point = qparams_of(low, high, self.args, global_scale, self.label())
        return {"scale": scale, "zero_point": zero_point, "global_scale": global_scale}

    @torch.no_grad()
    @guarded
    def get_global_scale(self) -> Tensor | None:
        """Return the scale of the local scales, common to all fused observers (TENSOR_GROUP)."""
        if self.args.strategy != QuantizationStrategy.TENSOR_GROUP:
            return None
        missing = [other.label() for other in self._fused_observers if not other.has_statistics]
        if missing:
            raise FusedStatisticsError(self.label(), sorted(missing))
        absmax = _absmax(*self.get_range())
        for other in self._fused_observers:
            absmax = torch.maximum(absmax, _absmax(*other.get_range()).to(absmax.device))
        return global_scale_of(absmax)

    def __iter__(self) -> Iterator[Tensor]:
        """Unpack into scale and zero point, as the first generation of the API did."""
        qparams = self.get_qparams()
        return iter((qparams["scale"], qparams["zero_point"]))

    @property
    def num_observed_tokens(self) -> int:
        """How many tokens were observed; 0 for weights."""
        return int(getattr(self, "observed_tokens", 0))

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
            observer.__dict__["_lock"] = lock

    @property
    def fused_with(self) -> frozenset[Observer]:
        """The others that share its global scale."""
        return frozenset(self._fused_observers)

    # Life in a model

    def attach(self, module: torch.nn.Module) -> None:
        """Prepare for observing ``module``: a subclass may register hooks."""

    def detach(self, module: torch.nn.Module) -> None:
        """Undo what ``attach`` did."""

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
        of = f" of {self.module_name}" if self.module_name else ""
        return f"Observer '{self.registered_name()}' ({self.base_name}{of})"

    def extra_repr(self) -> str:
        """Describe the observer in a printed model."""
        settings = ", ".join(f"{k}={v}" for k, v in self.options.model_dump().items())
        fmt = Format.of(self.args)
        cut = strategy_name(self.args)
        return f"{self.base_name}, {fmt.kind}{fmt.bits} per {cut}, {settings}"

    def _parse_options(self, given: Mapping[str, Any]) -> ObserverOptions:
        if self.Options is not None:
            return parse_options(self.Options, given, self.registered_name())
        known = {key: value for key, value in given.items() if key in ObserverOptions.model_fields}
        return parse_options(ObserverOptions, known, self.registered_name())


Observer.registry = Registry(Observer)


def _as_float(observed: Tensor) -> Tensor:
    """Convert integers and 8-bit floats into a float type that holds all their values."""
    if observed.is_floating_point():
        return observed.float() if observed.dtype.itemsize == 1 else observed
    return observed.double() if observed.dtype.itemsize > 2 else observed.float()


def _absmax(min_vals: Tensor, max_vals: Tensor) -> Tensor:
    return torch.maximum(-min_vals.min(), max_vals.max())
