"""The plan: every tensor that is quantized, and everything that is measured, before data runs.

And the steps it is made by: what they ask for before, and what they answer after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from calipers.errors import counted
from calipers.notebook import NotebookView
from calipers.observers import QParamsDict
from calipers.planning.specs import ModuleSpec, Requirement, TensorSpec

QParams = Mapping[tuple[str, str], QParamsDict]
"""(module, tensor) → its parameters."""

Propagation = Literal["float", "quantized", "both"]
"""What a layer is calibrated on: what those before it gave as they were, or as they have become; or
the latter, so as to give what was meant by the former."""
PROPAGATIONS: tuple[Propagation, ...] = get_args(Propagation)

_COLUMNS = ("module", "tensor", "format", "strategy", "observer", "data")


@dataclass(frozen=True)
class StepPlan:
    """What one step of a recipe does with a model.

    :param modules: what it quantizes
    :param measured: module → what it wants to know of it besides
    :param propagation: what it calibrates layers on
    :param changed: other modules whose tensors it changes, such as norms
    :param tunes_layers: whether it works on each decoder layer as a whole, too, when the modules
        inside are solved; with ``propagation="both"`` alone
    :param finishes: whether it works on the whole model, too, when all of it is solved, with data
    """

    modules: tuple[ModuleSpec, ...] = ()
    measured: Mapping[str, tuple[Requirement, ...]] = field(default_factory=dict)
    propagation: Propagation = "float"
    changed: tuple[str, ...] = ()
    tunes_layers: bool = False
    finishes: bool = False


@dataclass(frozen=True)
class TransformPlan:
    """What a step does to a model before anything else is measured; the model computes the same.

    :param measured: module → what it wants to know of it
    :param changed: modules whose tensors it changes
    :param affected: (module, tensor) → whether each of its channels is divided by a factor, by
        which statistics can be divided too; or else they have to be measured again
    :param together: modules that are changed together, in groups
    """

    measured: Mapping[str, tuple[Requirement, ...]] = field(default_factory=dict)
    changed: tuple[str, ...] = ()
    affected: Mapping[tuple[str, str], bool] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Transformed:
    """What a step has made of some modules before they are measured.

    :param tensors: (module, name of a parameter) → its new value
    :param divisors: module → by what each channel of its input is divided now
    :param facts: module → what was chosen for it, for people
    """

    tensors: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)
    divisors: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def joined(self, other: Transformed) -> Transformed:
        """Return what was done by these and, later, by others."""
        divisors = dict(self.divisors)
        for name, factors in other.divisors.items():
            divisors[name] = divisors[name] * factors if name in divisors else factors
        facts = {name: dict(each) for name, each in self.facts.items()}
        for name, each in other.facts.items():
            facts.setdefault(name, {}).update(each)
        return Transformed({**self.tensors, **other.tensors}, divisors, facts)


@dataclass(frozen=True)
class Changes:
    """What a step makes of some modules. Nothing is changed before all of it is known.

    :param qparams: (module, tensor) → its quantization parameters
    :param tensors: (module, name of a parameter or buffer) → its new value, of the same shape and
        dtype: weights, biases, norms, embeddings
    :param published: module → attributes that it gets, for whoever comes later
    :param notes: module → what was done otherwise than the recipe says, and why
    :param chosen: module → option of the step → what was chosen for it by data
    :param figures: step → what is known of how it went, by name
    :param codes: module → its packed weight, from disk to disk; the engine adds them
    """

    qparams: QParams = field(default_factory=dict)
    tensors: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)
    published: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    chosen: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    codes: Mapping[str, Tensor] = field(default_factory=dict)

    def joined(self, other: Changes) -> Changes:
        """Return these changes and others, which win.

        >>> one, two = (Changes(published={"up_proj": {n: torch.ones(1)}}) for n in ("a", "b"))
        >>> sorted(one.joined(two).published["up_proj"])
        ['a', 'b']
        """
        published = {name: dict(attributes) for name, attributes in self.published.items()}
        for name, attributes in other.published.items():
            published.setdefault(name, {}).update(attributes)
        return Changes(
            {**self.qparams, **other.qparams},
            {**self.tensors, **other.tensors},
            published,
            {**self.notes, **other.notes},
            {**self.chosen, **other.chosen},
            {**self.figures, **other.figures},
            {**self.codes, **other.codes},
        )


class Step(Protocol):
    """An entry of a recipe with a life of its own."""

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:
        """Say what it does with a model, which is only looked at.

        :param step: the name of this step, which its tensors carry
        """

    def plan_transform(self, model: torch.nn.Module, plan: Plan, step: str) -> TransformPlan | None:
        """Say what it changes before anything is measured; None: nothing.

        :param plan: what all steps do with the model otherwise
        """

    def transform(self, layer: Any, plan: TransformPlan) -> Transformed:
        """Change some modules so that the model computes the same, and is quantized better."""

    def solve(self, layer: Any) -> Changes:
        """Turn what was measured of some modules into changes."""

    def tune(self, layer: Any, stream: Any) -> Changes:
        """Improve a whole decoder layer; called where ``StepPlan.tunes_layers`` asks for it."""

    def finish(self, whole: Any) -> Changes:
        """Improve the whole model; called where ``StepPlan.finishes`` asks for it."""


@dataclass(frozen=True)
class Plan(NotebookView):
    """What a recipe means for one model.

    :param modules: what is quantized, in the order of the model
    :param measured: module → what steps want to know of it besides
    :param steps: the steps by their names, in the order of the recipe
    :param propagation: what layers are calibrated on
    :param changed: other modules whose tensors steps change
    :param tunes_layers: whether steps work on whole decoder layers, too
    :param finishing: the steps that work on the whole model, too, when all of it is solved
    :param transforms: step → what it does before anything else is measured
    """

    modules: tuple[ModuleSpec, ...] = ()
    measured: Mapping[str, tuple[Requirement, ...]] = field(default_factory=dict)
    steps: Mapping[str, Step] = field(default_factory=dict)
    propagation: Propagation = "float"
    changed: tuple[str, ...] = ()
    tunes_layers: bool = False
    finishing: tuple[str, ...] = ()
    transforms: Mapping[str, TransformPlan] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The modules that are quantized, measured or changed, each once."""
        quantized = (module.name for module in self.modules)
        transformed = (name for each in self.transforms.values() for name in each.changed)
        return list(dict.fromkeys([*quantized, *self.measured, *self.changed, *transformed]))

    def __iter__(self) -> Iterator[tuple[ModuleSpec, TensorSpec]]:
        """Go through all tensors, each with its module."""
        return ((module, tensor) for module in self.modules for tensor in module.tensors)

    @property
    def needs_data(self) -> bool:
        """Whether any tensor, or a step, needs data."""
        wanted = self.measured or self.measured_before or self.finishing
        return bool(wanted) or any(tensor.needs_data for _, tensor in self)

    @property
    def measured_before(self) -> Mapping[str, tuple[Requirement, ...]]:
        """What transforms want to know of modules, which is measured before all else."""
        wanted: dict[str, tuple[Requirement, ...]] = {}
        for transform in self.transforms.values():
            for name, requirements in transform.measured.items():
                wanted[name] = (*wanted.get(name, ()), *requirements)
        return wanted

    @property
    def affected(self) -> Mapping[tuple[str, str], bool]:
        """Return (module, tensor) → whether transforms do no more than divide its channels."""
        found: dict[tuple[str, str], bool] = {}
        for transform in self.transforms.values():
            for place, exact in transform.affected.items():
                found[place] = exact and found.get(place, True)
        return found

    @property
    def has_static_activations(self) -> bool:
        """Whether the range of anything but weights is found with data."""
        return any(tensor.needs_data for _, tensor in self if tensor.base_name != "weight")

    @property
    def uses_folds(self) -> bool:
        """Whether anything is to be measured of each fold of the data apart."""
        wanted = (requirements for _, requirements in self.requirements(with_costs=False))
        return any(each.in_folds for requirements in wanted for each in requirements)

    def requirements(self, *, with_costs: bool) -> Iterator[tuple[str, Iterable[Requirement]]]:
        """Go through the modules with what is to be measured of each.

        :param with_costs: whether that includes what costs are worked out from
        """
        for module in self.modules:
            besides = module.cost_requirements if with_costs else ()
            yield module.name, (*module.requirements, *besides)
        yield from self.measured.items()

    def rows(self) -> list[dict[str, Any]]:
        """Return the plan as plain data, a row for each tensor."""
        return [
            {
                "module": module.name,
                "tensor": tensor.base_name,
                "format": tensor.format,
                "strategy": tensor.strategy,
                "observer": tensor.observer_with_options,
                "data": "yes" if tensor.needs_data else "no",
            }
            for module, tensor in self
        ]

    def __repr__(self) -> str:
        kinds = Counter(f"{each.base_name} {each.format} per {each.strategy}" for _, each in self)
        parts = [f"{number} × {kind}" for kind, number in kinds.items()]
        if self.measured:
            parts.append(f"inputs of {counted(len(self.measured), 'module')} summed up")
        for label, transform in self.transforms.items():
            changed = counted(len(transform.changed), "module")
            parts.append(f"{changed} changed before by {label}")
        parts += [f"the whole model worked on by {label}" for label in self.finishing]
        return f"Plan({', '.join(parts) or 'nothing'})"

    def table(self) -> str:
        """Return the plan as text, one line a tensor."""
        rows = [{name: name for name in _COLUMNS}, *self.rows()]
        widths = {name: max(len(row[name]) for row in rows) for name in _COLUMNS}
        lines = ("  ".join(row[name].ljust(widths[name]) for name in widths) for row in rows)
        return "\n".join(line.rstrip() for line in lines)
