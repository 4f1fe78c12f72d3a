"""A plan: which tensor of which module is watched by which observer, before any tensor moves."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from rich.console import Console
from rich.table import Table

from calipers.errors import counted
from calipers.html import html_table
from calipers.numerics.formats import Format
from calipers.numerics.layout import strategy_name
from calipers.observers import Observer
from calipers.observers.gathering import gathers

ModuleKind = Literal["linear", "kv_cache", "attention"]

_MEMORYLESS = {
    "minmax": "memoryless_minmax",
    "static_minmax": "memoryless_minmax",
    "mse": "memoryless_mse",
}
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


def args_for(scheme: QuantizationScheme | None, base_name: str) -> QuantizationArgs | None:
    """Return how a scheme quantizes a tensor of its module, or None where it does not."""
    field = SCHEME_FIELDS.get(base_name, "input_activations")  # also of attention states
    found: QuantizationArgs | None = getattr(scheme, field, None)
    return found


def default_observer(base_name: str) -> str:
    """Return the name of the observer that watches a tensor where nobody chose one."""
    return "memoryless_minmax" if base_name == "weight" else "static_minmax"


def observer_for(base_name: str, args: QuantizationArgs) -> Observer | None:
    """Build the observer that watches a tensor; None where its scale is found while it runs.

    Weights are seen once: a moving average over them is their last value. A file of code that the
    arguments name does not run here; its class must be loaded already.

    >>> str(observer_for("weight", QuantizationArgs(observer="minmax", symmetric=False)))
    'MemorylessMinMaxObserver(weight, int8 per tensor, nonfinite=raise)'
    """
    if args.dynamic is True:
        return None
    name = args.observer or default_observer(base_name)
    if base_name == "weight":
        name = _MEMORYLESS.get(_registered_name(name), name)
        averaging = {"averaging_constant"} & (args.observer_kwargs or {}).keys()
        if averaging and name.startswith("memoryless"):
            kwargs = {k: v for k, v in args.observer_kwargs.items() if k not in averaging}
            args = args.model_copy(update={"observer_kwargs": kwargs})
    return Observer.load_from_registry(name, allow_code=False, base_name=base_name, args=args)


def _registered_name(name: str) -> str:
    return Observer.get_value_from_registry(name, allow_code=False).registered_name()


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor that is quantized: how, and by whom its range is found."""

    module: str
    base_name: str
    args: QuantizationArgs

    @cached_property
    def _trial(self) -> Observer | None:
        return observer_for(self.base_name, self.args)

    @property
    def observer(self) -> str | None:
        """The name of the observer; None where the scale is found while the model runs."""
        return None if self._trial is None else self._trial.registered_name()

    @property
    def observer_with_options(self) -> str:
        """The observer and the options it was given: ``optimal(importance=hessian)``."""
        if self._trial is None:
            return "dynamic"
        given = self._trial.args.observer_kwargs or {}
        options = ", ".join(f"{name}={value}" for name, value in given.items())
        return f"{self.observer}({options})" if options else str(self.observer)

    @property
    def sums(self) -> tuple[str, ...]:
        """The sums of inputs that the observer of a weight wants, by their names on the module."""
        return tuple(self._trial.gathered_fields()) if gathers(self._trial) else ()

    @property
    def needs_data(self) -> bool:
        """Whether data must run through the model before the range can be found."""
        return bool(self.sums) if self.base_name == "weight" else self._trial is not None

    def has_sums_on(self, module: torch.nn.Module) -> bool:
        """Whether the data of a weight was summed up before, and the sums are on its module."""
        return bool(self.sums) and all(hasattr(module, name) for name in self.sums)

    @property
    def format(self) -> str:
        """The number format in short: ``int4``, ``fp8``, ``int4 asym``."""
        fmt = Format.of(self.args)
        return f"{fmt.kind}{fmt.bits}" + ("" if self.args.symmetric else " asym")

    @property
    def strategy(self) -> str:
        """How the tensor is cut: ``channel``, ``group 128``, ``block 128x128``."""
        cut = strategy_name(self.args)
        if self.args.block_structure:
            return f"{cut} " + "x".join(map(str, self.args.block_structure))
        return f"{cut} {self.args.group_size}" if (self.args.group_size or 0) > 0 else cut


@dataclass(frozen=True)
class PlannedModule:
    """A module that is quantized, and the tensors of it that are."""

    name: str
    scheme: QuantizationScheme
    kind: ModuleKind = "linear"

    @cached_property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        """The tensors of the module that the scheme quantizes."""
        found = ((base, args_for(self.scheme, base)) for base in _TENSORS_OF[self.kind])
        return tuple(PlannedTensor(self.name, base, args) for base, args in found if args)


@dataclass(frozen=True)
class Plan:
    """What a recipe means for one model.

    :param modules: what is quantized, in the order of the model
    :param gathered: modules whose inputs are summed up for whoever comes later (IMatrixGatherer)
    """

    modules: tuple[PlannedModule, ...] = ()
    gathered: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The modules that are quantized or gathered from, each once."""
        quantized = [module.name for module in self.modules]
        return list(dict.fromkeys([*quantized, *self.gathered]))

    def __iter__(self) -> Iterator[PlannedTensor]:
        """Go through all tensors."""
        return (tensor for module in self.modules for tensor in module.tensors)

    @property
    def needs_data(self) -> bool:
        """Whether any tensor needs data."""
        return bool(self.gathered) or any(tensor.needs_data for tensor in self)

    @property
    def has_static_activations(self) -> bool:
        """Whether the range of anything but weights is found with data."""
        return any(tensor.needs_data for tensor in self if tensor.base_name != "weight")

    def rows(self) -> list[dict[str, Any]]:
        """Return the table as plain data."""
        return [
            {
                "module": tensor.module,
                "tensor": tensor.base_name,
                "format": tensor.format,
                "strategy": tensor.strategy,
                "observer": tensor.observer_with_options,
                "data": "yes" if tensor.needs_data else "no",
            }
            for tensor in self
        ]

    def __repr__(self) -> str:
        kinds = Counter(f"{each.base_name} {each.format} per {each.strategy}" for each in self)
        parts = [f"{number} × {kind}" for kind, number in kinds.items()]
        if self.gathered:
            parts.append(f"inputs of {counted(len(self.gathered), 'module')} summed up")
        return f"Plan({', '.join(parts) or 'nothing'})"

    def _repr_html_(self) -> str:
        return html_table(self.rows(), repr(self))

    def table(self) -> str:
        """Return the plan as text, one line a tensor."""
        table = Table(box=None, pad_edge=False)
        for name in ("module", "tensor", "format", "strategy", "observer", "data"):
            table.add_column(name, no_wrap=True)
        for row in self.rows():
            table.add_row(*row.values())
        text = io.StringIO()
        Console(file=text, width=1000).print(table)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())
