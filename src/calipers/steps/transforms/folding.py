"""What equalizing steps share: which channels are meant, and how factors are put into tensors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from compressed_tensors.utils.match import is_match
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from calipers.errors import (
    CalipersWarning,
    ConfigurationError,
    RecipeError,
    TensorValueError,
    shortened,
)
from calipers.planning.checks import Unmatched, available_modules, check_patterns
from calipers.planning.plan import Plan, StepPlan, Transformed, TransformPlan
from calipers.planning.specs import Requirement
from calipers.solvers.equalization import storable_factors
from calipers.steps.base import Changes, Layer, Modifier, Patterns, read_patterns
from calipers.topology.experts import StackedForm
from calipers.topology.folding import Fold, Folds
from calipers.topology.model import Topology
from calipers.topology.names import expert_of


class FoldMapping(BaseModel):
    """Which modules are divided, and which read them: patterns as a recipe has them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    smooth_layer: str
    balance_layers: Patterns

    @classmethod
    def read(cls, value: Any) -> tuple[FoldMapping, ...] | None:
        """Read mappings: pairs of readers and source, or mappings with keys, or objects."""
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise ConfigurationError("must be a list of mappings", got=repr(value))
        return tuple(cls._read_one(each, index) for index, each in enumerate(value))

    @classmethod
    def _read_one(cls, value: Any, index: int) -> FoldMapping:
        keys = tuple(cls.model_fields)
        if isinstance(value, cls):
            return value
        if all(hasattr(value, key) for key in keys):  # the class of llm-compressor
            value = {key: getattr(value, key) for key in keys}
        if isinstance(value, Mapping):
            unknown = sorted(map(str, value.keys() - {*keys, "activation_hook_target"}))
            if unknown or not value.keys() >= {*keys}:
                what = f"unknown key '{unknown[0]}'" if unknown else "a key is missing"
                raise RecipeError(f"{what} in a mapping", allowed=keys, path=(index,))
            value = value["balance_layers"], value["smooth_layer"]
        if not (isinstance(value, list | tuple) and len(value) == 2):
            must = "a mapping is a pair: the modules that read, and the one whose output they read"
            raise RecipeError(must, got=repr(value), path=(index,))
        readers, source = value
        if isinstance(source, list | tuple) and len(source) == 1:
            source = source[0]
        if not isinstance(source, str):
            raise RecipeError("one pattern must name the source", got=repr(source), path=(index,))
        return cls(smooth_layer=source, balance_layers=read_patterns(readers))


@dataclass(frozen=True)
class ChosenFold:
    """A fold with the readers for whose sake its factors are chosen; others make up for them."""

    fold: Fold
    readers: tuple[str, ...]


@dataclass(frozen=True)
class EqualizationPlan(TransformPlan):
    """What a step equalizes.

    :param folds: in the order in which they are taken
    """

    folds: tuple[ChosenFold, ...] = ()

    def of(self, layer: Layer) -> Iterator[ChosenFold]:
        """Go through those whose modules are all at hand."""
        names = set(layer.names)
        return (each for each in self.folds if names.issuperset(each.fold.names))


class EqualizingModifier(Modifier):
    """Divides channels by factors that whoever reads them multiplies by: nothing is computed twice.

    :param mappings: which channels: by default those behind norms, values of attention, and what
        gates multiply
    :param ignore: modules that are not divided, or whose readers are left out of the choice
    :param unmatched: what happens if a pattern matches nothing
    """

    smooths_experts_together: ClassVar[bool] = True
    """Whether norms in front of several experts are meant where the recipe gives no mappings."""

    mappings: tuple[FoldMapping, ...] | None = None
    ignore: Patterns = ()
    unmatched: Unmatched = "error"

    def target_patterns(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the patterns of what is quantized: nothing."""
        return (), ()

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:  # noqa: ARG002
        """Quantize nothing."""
        check_patterns(model, f"{self.label()}.ignore", self.ignore, self.unmatched)
        return StepPlan()

    def solve(self, layer: Layer) -> Changes:  # noqa: ARG002
        """Find nothing: all is done before."""
        return Changes()

    def requirements(self, reader: str, plan: Plan) -> tuple[Requirement, ...]:
        """Return what is measured of a module for whose sake factors are chosen."""
        raise NotImplementedError

    def factors(self, layer: Layer, chosen: ChosenFold) -> tuple[Tensor, dict[str, Any]] | None:
        """Return the factors of a fold, and what is told of them; None: no data reached it."""
        raise NotImplementedError

    def plan_transform(
        self,
        model: torch.nn.Module,
        plan: Plan,
        step: str,  # noqa: ARG002
    ) -> EqualizationPlan | None:
        """Find the channels that are meant; refuse those that cannot be folded."""
        folds = Folds.of(model)
        quantized = {module.name for module in plan.modules if module.tensor("weight")}
        if self.mappings is None:
            chosen = self._inferred(model, folds, quantized)
        else:
            chosen = self._mapped(model, folds)
        chosen = [each for each in chosen if not self._is_ignored(model, each)]
        if not chosen:
            return None
        return EqualizationPlan(
            {
                name: wanted
                for each in chosen
                for name in each.readers
                if (wanted := self.requirements(name, plan))
            },
            tuple(dict.fromkeys(name for each in chosen for name in each.fold.names)),
            {place: exact for each in chosen for place, exact in _affected(each.fold)},
            tuple(each.fold.names for each in chosen),
            tuple(chosen),
        )

    def _inferred(
        self, model: torch.nn.Module, folds: Folds, quantized: set[str]
    ) -> list[ChosenFold]:
        """Take every fold inside the layers that a quantized Linear reads."""
        inside = Topology.of(model)
        chosen = []
        for fold in folds.found:
            readers = [
                name
                for name in fold.readers
                if isinstance(model.get_submodule(name), torch.nn.Linear)
                and (not quantized or name in quantized)
            ]
            of_experts = fold.kind == "norm" and any(map(expert_of, readers))
            if of_experts and not self.smooths_experts_together:
                continue
            if readers and all(map(inside.layer_of, fold.names)):
                chosen.append(ChosenFold(fold, tuple(readers)))
        passed_over = [name for name in folds.obstacles if inside.layer_of(name) is not None]
        by_problem: dict[str, list[str]] = {}
        for name in passed_over:
            if not is_match(name, model.get_submodule(name), self.ignore):
                by_problem.setdefault(folds.obstacles[name], []).append(name)
        for problem, names in by_problem.items():
            warnings.warn(
                CalipersWarning(
                    f"{self.label()} leaves {shortened(names, 2)} as it is: {problem}",
                    hint="Add it to 'ignore', or give 'mappings', if that is meant",
                ),
                stacklevel=4,
            )
        if not chosen:
            raise RecipeError(
                f"{self.label()} finds nothing to equalize in {type(model).__name__}: which "
                "modules read which norms is not known of it, or nothing of that is quantized",
                hint=available_modules(model),
            )
        return chosen

    def _mapped(self, model: torch.nn.Module, folds: Folds) -> list[ChosenFold]:
        """Take the folds that mappings mean; all of a mapping must be found."""
        chosen: dict[str, ChosenFold] = {}
        by_source = {fold.source: fold for fold in folds.found}
        for index, mapping in enumerate(self.mappings or ()):
            where = f"{self.label()}.mappings[{index}]"
            patterns = (mapping.smooth_layer, *mapping.balance_layers)
            check_patterns(model, where, patterns, self.unmatched)
            unread = set(mapping.balance_layers)
            sources = [n for n, m in model.named_modules() if is_match(n, m, mapping.smooth_layer)]
            for source in sources:
                if source not in by_source:
                    self._refuse(model, folds, source, where)
                    continue
                fold, readers = by_source[source], list[str]()
                for pattern in mapping.balance_layers:
                    modules = ((name, model.get_submodule(name)) for name in fold.readers)
                    found = [name for name, module in modules if is_match(name, module, pattern)]
                    unread -= {pattern} if found else set()
                    readers += [name for name in found if name not in readers]
                linear = [n for n in readers if isinstance(model.get_submodule(n), torch.nn.Linear)]
                if linear:
                    chosen[source] = ChosenFold(fold, tuple(linear))
            if unread and self.unmatched == "error":
                pattern = sorted(unread)[0]
                raise RecipeError(
                    f"'{pattern}' matches nothing that reads '{mapping.smooth_layer}'",
                    where=where,
                    hint="What reads its output is what has to be balanced: "
                    + "; ".join(f"{s} → {shortened(by_source[s].readers, 4)}" for s in sources[:1]),
                )
        return sorted(chosen.values(), key=lambda each: each.fold.kind != "norm")

    def _refuse(self, model: torch.nn.Module, folds: Folds, source: str, where: str) -> None:
        """Refuse a source whose output cannot be divided, unless it is ignored."""
        if is_match(source, model.get_submodule(source), self.ignore):
            return
        problem = folds.obstacles.get(source, "what reads its output is not known")
        raise RecipeError(
            f"The output of '{source}' cannot be divided: {problem}",
            where=where,
            hint="Leave it out of the mapping, or add it to 'ignore'",
        )

    def _is_ignored(self, model: torch.nn.Module, chosen: ChosenFold) -> bool:
        def ignored(name: str) -> bool:
            return bool(is_match(name, model.get_submodule(name), self.ignore))

        return bool(self.ignore) and (
            ignored(chosen.fold.source) or all(map(ignored, chosen.readers))
        )

    def transform(self, layer: Layer, plan: TransformPlan) -> Transformed:
        """Choose factors fold by fold, and put them into weights."""
        assert isinstance(plan, EqualizationPlan)
        total = Transformed()
        folds = list(plan.of(layer))
        with torch.no_grad(), layer.progress.counting("equalizing", len(folds), "channels") as add:
            for chosen in folds:
                layer.ranks.check()
                found = self.factors(layer, chosen)
                add(1)
                if found is None:
                    total = total.joined(
                        Transformed(facts={chosen.fold.source: {"left": "no data reached it"}})
                    )
                    continue
                factors, facts = found
                done = folded(layer, chosen.fold, factors, {"step": self.label(), **facts})
                layer = replace(layer, new_tensors={**layer.new_tensors, **done.tensors})
                total = total.joined(done)
        return total


def _affected(fold: Fold) -> Iterator[tuple[tuple[str, str], bool]]:
    """Go through the tensors that are others afterwards, with whether statistics follow."""
    for name in fold.readers:
        yield (name, "input"), True
        yield (name, "weight"), True
    if fold.kind != "norm":
        yield (fold.source, "output"), False
        yield (fold.source, "weight"), False
    if fold.kind == "values":
        yield (fold.source.rpartition(".")[0], "v"), False


def folded(layer: Layer, fold: Fold, factors: Tensor, facts: Mapping[str, Any]) -> Transformed:
    """Divide a source by factors, and multiply the columns of all that read it."""
    source = fold.source
    weight, tensors = layer.weight(source).detach(), dict[tuple[str, str], Tensor]()
    bias = layer.module(source)._parameters.get("bias")
    if fold.kind == "norm":
        tensors[source, "weight"], factors = storable_factors(weight, factors, fold.offset)
    else:
        tensors[source, "weight"] = _times(weight, (1 / factors.double())[:, None])
    if bias is not None:
        tensors[source, "bias"] = _times(
            layer.tensor(source, "bias").detach(), 1 / factors.double()
        )
    expanded = fold.expanded(factors.double().cpu())
    for name in fold.readers:
        module = layer.module(name)
        if "weight" in module._parameters:
            tensors[name, "weight"] = _times(layer.weight(name).detach(), expanded)
            continue
        form = StackedForm.of(module, name)
        stack = "gate_up_proj" if form.has_gate else "up_proj"
        columns = expanded[:, None] if form.transposed else expanded
        tensors[name, stack] = _times(layer.tensor(name, stack).detach(), columns)
    for (name, tensor), value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise TensorValueError(
                f"{name}.{tensor} overflows {str(value.dtype).removeprefix('torch.')} when the "
                f"output of '{source}' is divided by factors from {float(factors.min()):.2g} to "
                f"{float(factors.max()):.2g}",
                hint="Choose a lower strength, or add the module to 'ignore'",
            )
    told = {"smallest": float(factors.min()), "largest": float(factors.max())}
    readers = {"readers": list(fold.readers)}
    divisors = dict.fromkeys(fold.readers, expanded)
    return Transformed(tensors, divisors, {source: {**facts, **told, **readers}})


def _times(tensor: Tensor, factors: Tensor) -> Tensor:
    """Multiply in float32 or better, and round once."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return (tensor.to(wide) * factors.to(tensor.device, wide)).to(tensor.dtype)
