"""What a step of a recipe is: a modifier, what it is given to solve, and where it is registered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Annotated, Any, ClassVar

import torch
from compressed_tensors.offload import disable_onloading
from compressed_tensors.utils.match import is_match
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError
from torch import Tensor

from calipers.calibration.layer_stream import LayerStream
from calipers.calibration.whole_model import WholeModel
from calipers.errors import CalipersError, ConfigurationError, RecipeError, first_line, nearest
from calipers.measurements import Measurements
from calipers.planning.plan import (
    Changes,
    Plan,
    QParams,
    StepPlan,
    Transformed,
    TransformPlan,
)
from calipers.planning.specs import ModuleSpec
from calipers.registry import Registry
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import Ranks
from calipers.solvers.gptq import CurvatureCache

__all__ = ["Changes", "Layer", "Modifier", "Patterns", "QParams"]


@dataclass(frozen=True)
class Layer:
    """Modules whose data has run: those of a decoder layer, or all of a model.

    :param modules: those that the step quantizes, with the tensors that it solves
    :param names: all whose data has run, also those that are measured only
    :param unseen: those that no token has reached, and what was done about it
    :param new_tensors: (module, tensor) → the value that an earlier step has given it
    :param qparams: the parameters that were found before the layer is tuned as a whole
    :param curvatures: factorised Hessians that others solve with, too; None: there are no others
    """

    model: torch.nn.Module
    modules: tuple[ModuleSpec, ...]
    names: tuple[str, ...]
    measurements: Measurements
    ranks: Ranks
    progress: Progress
    unseen: Mapping[str, str] = field(default_factory=dict)
    new_tensors: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)
    qparams: QParams = field(default_factory=dict)
    curvatures: CurvatureCache | None = None

    def module(self, name: str) -> torch.nn.Module:
        """Return a module by its name."""
        return self.model.get_submodule(name)

    def weight(self, name: str) -> Tensor:
        """Return the weight of a module as earlier steps left it, loaded if it was offloaded."""
        return self.tensor(name, "weight")

    def tensor(self, name: str, tensor: str) -> Tensor:
        """Return a parameter or buffer of a module as earlier steps left it."""
        if (name, tensor) in self.new_tensors:
            return self.new_tensors[name, tensor]
        value = getattr(self.module(name), tensor)
        assert isinstance(value, Tensor)
        return value

    def size(self, module: ModuleSpec) -> int:
        """Return how many numbers the weight of a module has, without loading it."""
        with disable_onloading():
            return self.weight(module.name).numel()

    def of_step(self, step: str) -> Layer:
        """Return what concerns one step."""
        mine = (module.of_step(step) for module in self.modules)
        return replace(self, modules=tuple(module for module in mine if module.tensors))


Path = tuple[str | int, ...]


def read_patterns(value: Any) -> tuple[str, ...]:
    """Read one pattern or several; those after ``re:`` must be regular expressions.

    >>> read_patterns("Linear")
    ('Linear',)
    """
    if value is None:
        return ()
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, list | tuple):
        raise ConfigurationError(
            "must be a name, a class, a 're:' pattern or a list", got=repr(value)
        )
    for index, pattern in enumerate(patterns):
        if not isinstance(pattern, str):
            must = "a name, a class or a 're:' pattern must be text"
            raise RecipeError(must, got=repr(pattern), path=(index,))
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            problem = f"'{pattern}' is not a regular expression: {error}"
            raise RecipeError(problem, path=(index,)) from None
    return tuple(patterns)


Patterns = Annotated[tuple[str, ...], PlainValidator(read_patterns)]
"""Names of modules, names of classes, and regular expressions after ``re:``; or one of them."""


class Modifier(BaseModel):
    """A step of a recipe. Its fields are the keys that a recipe may give it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    orders_columns: ClassVar[bool] = False
    """Whether ``actorder`` of a scheme means something."""
    runs_layers: ClassVar[bool] = False
    """Whether it learns from layers that run, for which measurements do not stand in."""
    method: ClassVar[str] = ""
    """The value of ``method`` by which it is chosen to round weights; a subclass has its own."""

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise self._explain(error) from None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> list[Modifier]:
        """Make what an entry of a recipe stands for, of its keys: one modifier, or several."""
        return [cls(**given)]

    @classmethod
    def known_keys(cls, path: Path) -> Iterable[str]:
        """Return the keys allowed at a path inside the modifier."""
        return [] if path else list(cls.model_fields)

    def target_patterns(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the patterns of what is meant, and of what is not."""
        raise NotImplementedError

    def targets_module(self, name: str, module: torch.nn.Module) -> bool:
        """Whether a module of this name is meant."""
        targets, ignore = self.target_patterns()
        return bool(is_match(name, module, targets)) and not is_match(name, module, ignore)

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:
        """Say what is done with a model, which is only looked at.

        :param step: the name of this step, which the specs of its tensors carry
        """
        raise NotImplementedError

    def plan_transform(
        self,
        model: torch.nn.Module,  # noqa: ARG002
        plan: Plan,  # noqa: ARG002
        step: str,  # noqa: ARG002
    ) -> TransformPlan | None:
        """Say what it changes before anything is measured; None: nothing.

        :param plan: what all steps of the recipe do with the model otherwise
        """
        return None

    def transform(self, layer: Layer, plan: TransformPlan) -> Transformed:
        """Change modules so that the model computes the same, and can be quantized better.

        :param layer: all modules whose data has run
        :param plan: what ``plan_transform`` has answered
        """
        raise NotImplementedError

    def solve(self, layer: Layer) -> Changes:
        """Turn what was measured of some modules into changes to them."""
        raise NotImplementedError

    def tune(self, layer: Layer, stream: LayerStream) -> Changes:  # noqa: ARG002
        """Improve a whole decoder layer, after :meth:`solve` was called for all its modules.

        Called where the plan says ``tunes_layers``, in all processes alike.

        :param layer: its modules, with what was solved in ``new_tensors`` and ``qparams``
        :param stream: what goes into the layer, and what it is meant to give
        """
        return Changes()

    def finish(self, whole: WholeModel) -> Changes:  # noqa: ARG002
        """Improve the whole model, after :meth:`solve` was called for all its modules.

        Called where the plan says ``finishes``, in all processes alike, before the model is
        changed. Codes of weights may stay or change, and so may any other tensor.
        """
        return Changes()

    def regrouped(self, size: int) -> Modifier | None:  # noqa: ARG002
        """Return the same with weights in groups of a size; None where none can have it."""
        return None

    def with_observer(self, key: str, choice: Any) -> Modifier | None:  # noqa: ARG002
        """Return the same with another observer; None where it would watch nothing.

        :param key: ``weight_observer`` or ``activation_observer``
        """
        return None

    def on_float_inputs(self) -> Modifier:
        """Return the same, calibrated on what a model computes as it is, if it was told nothing."""
        return self

    def converted_to(self, kind: type[Modifier]) -> Modifier | None:  # noqa: ARG002
        """Return one of another kind that says the same; None where it quantizes no weights."""
        return None

    def weight_formats(self) -> list[str]:
        """Say how weights are quantized, such as ``int4 per group 128``."""
        return []

    def label(self) -> str:
        """Return how messages call this modifier."""
        return type(self).__name__

    def to_data(self) -> dict[str, Any]:
        """Return the modifier as plain data, as a recipe would give it."""
        return plain_fields(self)

    @classmethod
    def _explain(cls, error: ValidationError) -> RecipeError:
        """Return the first problem that pydantic found, as an error of the recipe."""
        problems = error.errors()
        unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
        problem = (unknown or problems)[0]
        path = problem["loc"]
        where = ".".join(map(str, (cls.__name__, *path)))
        if unknown:
            key, known = str(path[-1]), list(cls.known_keys(path[:-1]))
            return RecipeError(
                f"unknown key '{key}' in {'.'.join(map(str, (cls.__name__, *path[:-1])))}",
                meant=nearest(key, known),
                allowed=known,
                path=path,
            )
        if problem["type"] != "value_error":
            demand = problem["msg"].replace("Input should", "must")
            return RecipeError(demand, subject=where, got=repr(problem["input"]), path=path)
        cause = problem["ctx"]["error"]
        if isinstance(cause, RecipeError):  # one about the modifier as a whole names it itself
            return RecipeError.of(cause, where if path else "", (*path, *cause.path))
        if isinstance(cause, CalipersError):
            return RecipeError.of(cause, where, path)
        return RecipeError(first_line(str(cause)), where=where, path=path)


def plain_fields(model: BaseModel) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as plain data."""
    fields = type(model).model_fields
    given = {name: getattr(model, name) for name in fields}
    return {
        name: to_plain(value)
        for name, value in given.items()
        if value is not None and value != fields[name].get_default(call_default_factory=True)
    }


def to_plain(value: Any) -> Any:
    """Turn a value of a field into what YAML can hold."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, BaseModel):
        return value.to_data() if hasattr(value, "to_data") else plain_fields(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return str(value)


STEPS: Registry[type[Modifier]] = Registry(
    "modifier",
    "calipers.steps",
    {
        "QuantizationModifier": "calipers.steps.quantization:QuantizationModifier",
        "GPTQModifier": "calipers.steps.gptq:GPTQModifier",
        "AutoRoundModifier": "calipers.steps.rounding:AutoRoundModifier",
        "IMatrixGatherer": "calipers.steps.imatrix:IMatrixGatherer",
        "TuningModifier": "calipers.steps.tuning:TuningModifier",
        "SmoothQuantModifier": "calipers.steps.transforms.smoothquant:SmoothQuantModifier",
        "AWQModifier": "calipers.steps.transforms.awq:AWQModifier",
        "SpinQuantModifier": "calipers.steps.transforms.spinquant:SpinQuantModifier",
        "QuIPModifier": "calipers.steps.transforms.spinquant:QuIPModifier",
    },
    base=Modifier,
    error=RecipeError,
)
"""The steps by the names of their classes."""


def steps_by_method() -> dict[str, type[Modifier]]:
    """Return the steps that round weights, by the values that ``method`` may have.

    >>> list(steps_by_method())
    ['rtn', 'gptq', 'rounding']
    """
    steps: dict[str, type[Modifier]] = {}
    for _, step in STEPS.parts():
        method = vars(step).get("method")
        if method and steps.setdefault(method, step) is not step:
            raise ConfigurationError(
                f"is that of two modifiers: {STEPS.name_of(steps[method])} and "
                f"{STEPS.name_of(step)}",
                subject=f"The method '{method}'",
                hint="Uninstall the package of one of them, or have its method renamed",
            )
    return steps
