"""Specs: for every tensor its format, layout and observer, and what must be measured for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
)

from calipers.errors import CalipersError, RecipeError, tensor_of, unfit
from calipers.numerics.formats import Format, ScaleKind
from calipers.numerics.layout import Layout, granularity_name, has_few_scales, strategy_name
from calipers.observers.spec import COUNTS as COUNTS
from calipers.observers.spec import ObserverSpec
from calipers.solvers.importance import FullHessian, Importance
from calipers.statistics.base import Statistic
from calipers.statistics.sums import SquareSums, TokenSquares
from calipers.statistics.value_counts import ValueCounts


def has_free_groups(args: QuantizationArgs | None) -> bool:
    """Whether a tensor is cut into groups whose size its format leaves open.

    >>> has_free_groups(QuantizationArgs(num_bits=4, strategy="group", group_size=128))
    True
    >>> has_free_groups(QuantizationArgs(num_bits=4, strategy="channel"))
    False
    """
    if args is None or args.strategy != QuantizationStrategy.GROUP:
        return False
    return Format.of(args).scale is ScaleKind.FLOAT


def regrouped(scheme: QuantizationScheme, size: int) -> QuantizationScheme:
    """Return a copy whose weights, if their groups are free, have groups of this size."""
    copy: QuantizationScheme = scheme.model_copy(deep=True)
    if has_free_groups(copy.weights):
        copy.weights = copy.weights.model_copy(update={"group_size": size})
    return copy


def without_observers(scheme: QuantizationScheme, fields: Iterable[str]) -> QuantizationScheme:
    """Return a copy whose arguments in these fields name no observer."""
    changed = {name: args_without_observer(getattr(scheme, name)) for name in fields}
    copy: QuantizationScheme = scheme.model_copy(deep=True).model_copy(update=changed)
    return copy


def args_without_observer(args: QuantizationArgs | None) -> QuantizationArgs | None:
    """Return a copy that names no observer."""
    if args is None:
        return None
    copy: QuantizationArgs = args.model_copy(update={"observer": None, "observer_kwargs": {}})
    return copy


ModuleKind = Literal["linear", "kv_cache", "attention"]

SCHEME_FIELDS = {
    "weight": "weights",
    "input": "input_activations",
    "output": "output_activations",
}
"""Which field of a scheme holds the arguments of a tensor of a Linear module."""

_TENSORS_OF: dict[ModuleKind, tuple[str, ...]] = {
    "linear": ("weight", "input", "output"),
    "kv_cache": ("k", "v"),
    "attention": ("q", "k", "v"),
}

IMPORTANCE = "importance"
"""The key of what is known of the inputs of a weight."""
SQUARES = "squares"
"""The key of sums of squares, from which costs are worked out."""
SENSITIVITY = "sensitivity"
"""The key of how much the loss of the model depends on a weight."""


def args_for(scheme: QuantizationScheme | None, base_name: str) -> QuantizationArgs | None:
    """Return how a scheme quantizes a tensor of its module, or None where it does not."""
    field = SCHEME_FIELDS.get(base_name, "input_activations")  # also of attention states
    found: QuantizationArgs | None = getattr(scheme, field, None)
    return found


@dataclass(frozen=True)
class Requirement:
    """A statistic that is to be gathered of a tensor while data runs.

    :param base_name: of which tensor of its module
    :param key: under which it is found in the measurements
    :param create: makes it, empty, for the module of a name
    :param published: the attributes of the module in which an earlier run may have left it
    :param is_optional: whether results do without it where the tensor cannot be measured
    :param in_folds: whether folds of the data are measured apart, where data comes in such
    """

    base_name: str
    key: str
    create: Callable[[str], Statistic]
    published: tuple[str, ...] = ()
    is_optional: bool = False
    in_folds: bool = False


@dataclass(frozen=True, eq=False)
class TensorSpec:
    """How one tensor is quantized. Thousands of modules share the specs of one scheme.

    :param observer: what finds its parameters; None where they are found while the model runs
    :param step: the step of the recipe that solves it
    :param gathered: what that step gathers of the inputs of a weight, instead of what the observer
        asks for, which is part of it
    :param in_folds: whether it is gathered of each fold of the data apart
    """

    base_name: str
    args: QuantizationArgs
    observer: ObserverSpec | None
    step: str = ""
    gathered: Importance | None = None
    in_folds: bool = False

    @property
    def importance(self) -> Importance:
        """What is gathered of the inputs of a weight."""
        if self.base_name != "weight" or self.observer is None:
            return Importance()
        return self.gathered or self.observer.importance

    def importance_statistic(self, columns: int, module_name: str) -> Statistic:
        """Return an empty statistic of so many input channels, for a weight with importance."""
        statistic = self.importance.statistic(columns, self.args)
        assert statistic is not None
        assert self.observer is not None
        statistic.owner = f"{self.observer.name} (weight of {module_name})"
        return statistic

    @property
    def observer_with_options(self) -> str:
        """The observer and the options it was given: ``optimal(importance=hessian)``."""
        if self.observer is None:
            return "dynamic"
        given = self.observer.options_given.items()
        options = ", ".join(f"{name}={value}" for name, value in given)
        return f"{self.observer.name}({options})" if options else self.observer.name

    @property
    def needs_data(self) -> bool:
        """Whether data must run through the model before the parameters can be found."""
        if self.observer is None:
            return False
        return self.base_name != "weight" or bool(self.importance.fields)

    def has_data_on(self, module: torch.nn.Module) -> bool:
        """Whether the data of a weight was summed up before, and the sums are on its module."""
        fields = self.importance.published
        return bool(fields) and all(hasattr(module, name) for name in fields)

    @property
    def format(self) -> str:
        """The number format in short: ``int4``, ``fp8``, ``int4 asym``."""
        return Format.of(self.args).name + ("" if self.args.symmetric else " asym")

    @property
    def strategy(self) -> str:
        """How the tensor is cut: ``channel``, ``group 128``, ``block 128x128``."""
        return granularity_name(self.args)


def tensor_specs(
    scheme: QuantizationScheme, kind: ModuleKind = "linear", step: str = "", where: str = ""
) -> tuple[TensorSpec, ...]:
    """Resolve what a scheme means for the tensors of a module of a kind.

    :param where: the module that messages name
    """
    specs = []
    for base_name in _TENSORS_OF[kind]:
        args = args_for(scheme, base_name)
        if args is None:
            continue
        if base_name == "weight" and args.dynamic:
            problem = "a weight does not change while the model runs"
            raise unfit(where, base_name, problem, hint="Set 'dynamic: false'")
        try:
            Layout.of(base_name, args)
            observer = ObserverSpec.resolve(base_name, args)
        except CalipersError as error:
            raise RecipeError.of(error, tensor_of(where, base_name)) from error
        specs.append(TensorSpec(base_name, args, observer, step))
    return tuple(specs)


@dataclass(frozen=True, eq=False)
class ModuleSpec:
    """A module that is quantized, and the tensors of it that are.

    :param scheme: what compressed-tensors is told about it
    :param columns: the number of its input channels; None where it has none, as an Embedding
    """

    name: str
    scheme: QuantizationScheme
    tensors: tuple[TensorSpec, ...]
    kind: ModuleKind = "linear"
    columns: int | None = None

    def tensor(self, base_name: str) -> TensorSpec | None:
        """Return the spec of a tensor; None where it is not quantized."""
        return next((each for each in self.tensors if each.base_name == base_name), None)

    def of_step(self, step: str) -> ModuleSpec:
        """Return the module with the tensors alone that a step solves."""
        return replace(self, tensors=tuple(each for each in self.tensors if each.step == step))

    def weights_only(self) -> ModuleSpec:
        """Return the module with its activations left as they are."""
        keep = {"input_activations": None, "output_activations": None}
        scheme = self.scheme.model_copy(update=keep, deep=True)
        tensors = tuple(each for each in self.tensors if each.base_name == "weight")
        return replace(self, scheme=scheme, tensors=tensors)

    @property
    def requirements(self) -> Iterator[Requirement]:
        """What must be gathered before its tensors can be solved."""
        for tensor in self.tensors:
            observer = tensor.observer
            if observer is None:
                continue
            if tensor.base_name != "weight":
                for key, create in observer.statistics.items():
                    yield Requirement(tensor.base_name, key, create)
            elif tensor.importance.fields and self.columns is not None:
                create = partial(tensor.importance_statistic, self.columns)
                published = tensor.importance.published
                yield Requirement("input", IMPORTANCE, create, published, in_folds=tensor.in_folds)

    @property
    def cost_requirements(self) -> Iterator[Requirement]:
        """What is gathered besides, to tell what quantization costs."""
        for tensor in self.tensors:
            observer = tensor.observer
            if tensor.base_name == "weight" or observer is None or observer.counts_values:
                continue
            if has_few_scales(tensor.args):
                counts = partial(ValueCounts, tensor.base_name, strategy_name(tensor.args))
                yield _of_costs(tensor.base_name, COUNTS, counts)
        if self.kind == "linear" and self.columns is not None:
            weight = self.tensor("weight")
            importance = Importance() if weight is None else weight.importance
            if not importance.fields:
                yield _of_costs("input", SQUARES, partial(SquareSums, nonfinite="keep"))
            # Under a full Hessian E‖W x‖² follows from it: W E[x xᵀ] Wᵀ.
            if not isinstance(importance, FullHessian):
                yield _of_costs("output", SQUARES, TokenSquares)


def _of_costs(base_name: str, key: str, make: Callable[[], Statistic]) -> Requirement:
    return Requirement(base_name, key, lambda _name: make(), is_optional=True)


def module_format(module: torch.nn.Module, scheme: QuantizationScheme) -> CompressionFormat:
    """Return the format in which a quantized module is stored; the scheme stays untouched."""
    # The library asks for the exact class. A subclass of Linear is stored as a Linear.
    kinds: tuple[type[torch.nn.Module], ...] = (torch.nn.Linear, torch.nn.Embedding)
    kind = next((kind for kind in kinds if isinstance(module, kind)), type(module))
    return CompressionFormat(scheme.format or infer_module_format(kind, scheme))
