"""The loop over the parts of a model: each is solved, judged and given to a sink, then changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from compressed_tensors.offload import OffloadCache, disable_offloading, disable_onloading
from compressed_tensors.quantization import (
    QuantizationScheme,
    QuantizationStatus,
    initialize_module_for_quantization,
)
from torch import Tensor

from calipers.calibration.context import Calibration, expose_states
from calipers.calibration.coverage import Coverage, settle_unseen
from calipers.calibration.data import Batches
from calipers.calibration.partial_forward import NewValues
from calipers.calibration.pipelines import (
    Part,
    Parts,
    Run,
    run_basic,
    run_datafree,
    run_sequential,
)
from calipers.calibration.whole_model import WholeModel
from calipers.checkpoint.auxiliary_files import source_folder
from calipers.checkpoint.compression import shapes_of_quantized
from calipers.checkpoint.headers import bits_per_weight, stored_tensors
from calipers.checkpoint.state import join, tied_names
from calipers.errors import CalipersWarning, ConfigurationError, listing, shortened
from calipers.judging.costs import ModuleCosts, judge_layer, report_costs
from calipers.measurements import Measurements
from calipers.notebook import NotebookView
from calipers.numerics.qparams import ActivationQuantizer, fake_quantize, store_qparams
from calipers.numerics.tensors import digest_of
from calipers.options import Pipeline
from calipers.planning.measuring import derive_again
from calipers.planning.plan import Plan, QParams, Transformed
from calipers.planning.specs import ModuleSpec
from calipers.recipes import Recipe
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import Ranks
from calipers.solvers.gptq import CurvatureCache
from calipers.statistics.base import Statistic
from calipers.steps.base import Changes, Layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIPELINES: Mapping[Pipeline, Callable[[Run, Any], Parts]] = {
    "datafree": run_datafree,
    "basic": run_basic,
    "sequential": run_sequential,
}
"""How data runs through a model, by the values of the option ``pipeline`` but ``auto``."""


class Sink(Protocol):
    """Where the results of the loop go: a model, a checkpoint, measurements, or errors alone."""

    def take(self, part: Part) -> NewValues:
        """Take a part, and return the values that later parts must see."""


def run_parts(parts: Parts, *sinks: Sink) -> Iterator[Part]:
    """Let every sink take each part as soon as it is ready, and yield the parts that were taken."""
    with closing(parts):
        part = next(parts, None)
        while part is not None:
            new = NewValues()
            for sink in sinks:
                new = new.joined(sink.take(part))
            yield part
            try:
                part = parts.send(new)
            except StopIteration:
                return


@dataclass
class SolvedModel:
    """What was solved so far, but for the changes to the model.

    :param plan: what was quantized, how, and by which observers
    :param coverage: how many tokens each module saw
    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param costs: module → what its static activations and its output lose, where data ran
    :param notes: module → what was done otherwise than the recipe says, and why
    :param figures: step → what is known of how it went, by name
    :param transforms: module → what was chosen for it before all else was measured
    :param pipeline: how data ran; ``measurements`` where it had run before, ``datafree`` where none
        was needed
    :param samples: how many samples were seen, in all processes, and ``tokens`` how many tokens
    :param forward_dtype: in which the model computed; None: it did not
    """

    plan: Plan
    coverage: Coverage
    errors: dict[str, float] = field(default_factory=dict)
    costs: dict[str, ModuleCosts] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    figures: dict[str, Mapping[str, float]] = field(default_factory=dict)
    transforms: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    pipeline: str = "datafree"
    samples: int = 0
    tokens: int = 0
    forward_dtype: torch.dtype | None = None

    def provenance(self) -> dict[str, Any]:
        """Return what the checkpoint says about how it was made."""
        dtype = self.forward_dtype
        return {
            "pipeline": self.pipeline,
            "forward_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            "samples": self.samples,
            "tokens": self.tokens,
            "coverage": self.coverage.as_dict(),
            "weight_errors": self.errors,
            "costs": {name: asdict(each) for name, each in self.costs.items()},
            **({"notes": dict(self.notes)} if self.notes else {}),
            **(
                {"steps": {n: dict(each) for n, each in self.figures.items()}}
                if self.figures
                else {}
            ),
            **({"transforms": dict(self.transforms)} if self.transforms else {}),
        }


@dataclass(kw_only=True)
class OneshotResult(SolvedModel, NotebookView):
    """What ``oneshot`` or ``quantize`` did.

    :param model: the frozen model, which computes with fake quantization; where it went from disk
        to disk, its tensors have no values (they are on the meta device)
    :param recipe: the recipe, as it was carried out
    :param output_dir: where the checkpoint is, if one was asked for
    :param seconds: how long it took
    """

    model: PreTrainedModel
    recipe: Recipe
    output_dir: Path | None = None
    seconds: float = 0.0

    @property
    def dtype(self) -> torch.dtype:
        """That of the model."""
        return self.model.dtype

    @property
    def source(self) -> Path | None:
        """The folder that the model came from, if it is at hand."""
        return source_folder(self.model)

    @cached_property
    def bits_per_weight(self) -> float | None:
        """The bits that a quantized weight takes in the checkpoint, scales included."""
        if self.output_dir is None:
            return None
        return bits_per_weight(stored_tensors(self.output_dir), shapes_of_quantized(self.model))

    def __repr__(self) -> str:
        return f"OneshotResult({', '.join(f'{key}: {fact}' for key, fact in self.facts().items())})"

    def facts(self) -> dict[str, object]:
        """Return what matters most, by its name."""
        facts = {"model": type(self.model).__name__, "plan": self.plan, "coverage": self.coverage}
        if self.errors:
            facts["largest error of a weight"] = f"{max(self.errors.values()):.2%}"
        return facts if self.output_dir is None else {**facts, "written to": self.output_dir}


QuantizeResult = OneshotResult


@dataclass(frozen=True)
class StepDriver:
    """Solves modules by the steps of a plan, one step after another, and judges the results.

    :param solution: what it fills in
    :param curvatures: factorised Hessians, shared with drivers that solve the same modules
    :param keep_codes: whether changes carry the codes of weights, which are stored as they are.
        Those of a whole model would take the memory of its checkpoint
    """

    model: torch.nn.Module
    measurements: Measurements
    solution: SolvedModel
    ranks: Ranks
    progress: Progress
    curvatures: CurvatureCache | None = None
    keep_codes: bool = False
    _settled: set[str] = field(default_factory=set, init=False)
    _originals: dict[str, Tensor] = field(default_factory=dict, init=False)
    _chosen: dict[str, dict[str, float]] = field(default_factory=dict, init=False)

    def settle(self, names: Iterable[str]) -> None:
        """Merge what all processes have measured of modules, and decide about those without data.

        All processes call this with the same names; it is done once for each.
        """
        names = [name for name in dict.fromkeys(names) if name not in self._settled]
        self._settled.update(names)
        self._count_tokens(names)
        self.ranks.merge(self.measurements.of(names))
        plan = self.solution.plan
        wanted = set(names)
        modules = [module for module in plan.modules if module.name in wanted]
        changed = settle_unseen(modules, self.solution.coverage, self.measurements, self.ranks)
        if changed:
            everything = tuple(changed.get(module.name, module) for module in plan.modules)
            self.solution.plan = replace(plan, modules=everything)

    def solve(self, names: tuple[str, ...], *, is_final: bool = True) -> tuple[Layer, Changes]:
        """Solve modules, judge the result, and forget what was measured of them.

        All processes call this with the same names. Returns the layer as the steps have left it,
        and the changes to it.

        :param is_final: whether they are judged now: they are not tuned later
        """
        self.settle(names)
        layer, plan = self._layer(names), self.solution.plan
        changes = Changes()
        if plan.transforms:
            layer, done = transform_layer(layer, plan)
            derive_again(plan, names, self.measurements)
            self.solution.transforms |= done.facts
            changes = Changes(tensors=done.tensors)
        for label, step in plan.steps.items():
            own = layer.of_step(label)
            new = step.solve(own)
            check_changes(own, label, new)
            rounded = (name for name, local in new.tensors if local == "weight")
            for name in rounded:
                if (name, "weight") in new.qparams:
                    self._originals[name] = layer.weight(name)
            changes = changes.joined(new)
            layer = replace(layer, new_tensors=changes.tensors)
        self.solution.notes |= changes.notes
        self._chosen.update({name: dict(each) for name, each in changes.chosen.items()})
        self.measurements.forget_folds(names)
        return layer, self._judged(layer, changes, changes.qparams) if is_final else changes

    def tune(self, part: Part, solved: Changes) -> tuple[Layer, Changes]:
        """Let steps work on a whole layer, and judge the result.

        :param solved: what was solved before of the modules of the layer, and others
        """
        assert part.stream is not None
        wanted = set(part.names)
        qparams = {place: each for place, each in solved.qparams.items() if place[0] in wanted}
        layer = replace(self._layer(part.names), new_tensors=solved.tensors, qparams=qparams)
        changes = Changes()
        for label, step in self.solution.plan.steps.items():
            own = layer.of_step(label)
            new = step.tune(own, part.stream)
            check_changes(own, label, new)
            changes = changes.joined(new)
            layer = replace(
                layer,
                new_tensors={**solved.tensors, **changes.tensors},
                qparams={**qparams, **changes.qparams},
            )
        self.solution.notes |= changes.notes
        return layer, self._judged(layer, changes, layer.qparams)

    def _layer(self, names: tuple[str, ...]) -> Layer:
        solution, wanted = self.solution, set(names)
        applied = solution.coverage.applied.items()
        return Layer(
            self.model,
            tuple(module for module in solution.plan.modules if module.name in wanted),
            names,
            self.measurements,
            self.ranks,
            self.progress,
            unseen={name: policy for name, policy in applied if name in wanted},
            curvatures=self.curvatures,
        )

    def _judged(self, layer: Layer, changes: Changes, qparams: QParams) -> Changes:
        """Judge modules as they have become, and forget what was measured of them."""
        before = {
            name: self._originals.pop(name) for name in layer.names if name in self._originals
        }
        errors, costs, codes = judge_layer(layer, qparams, before, keep_codes=self.keep_codes)
        for name in self._chosen.keys() & set(layer.names):
            costs[name] = replace(costs.get(name) or ModuleCosts(), chosen=self._chosen.pop(name))
        self.solution.errors |= errors
        self.solution.costs |= costs
        self.measurements.forget(layer.names)
        return replace(changes, codes=codes)

    def finish(self, whole: WholeModel) -> Changes:
        """Let steps work on the whole solved model; return all changes, those before among them.

        What the outputs of modules lose stays as it was judged: what was measured is forgotten.
        """
        solution, changes = self.solution, whole.changes
        names = tuple(name for name, _ in self.model.named_modules())
        everything = Layer(
            self.model, whole.modules, names, self.measurements, self.ranks, self.progress
        )
        for label in solution.plan.finishing:
            new = solution.plan.steps[label].finish(replace(whole, changes=changes))
            check_changes(everything, label, new)
            changes = changes.joined(new)
            layer = replace(everything, new_tensors=changes.tensors)
            before = {
                name: everything.weight(name).detach()
                for name, local in new.tensors
                if (name, local) in new.qparams
            }
            solution.errors |= judge_layer(layer, new.qparams, before).errors
            solution.notes |= new.notes
            solution.figures |= new.figures
        return changes

    def transform(self, names: tuple[str, ...]) -> Transformed:
        """Transform modules that were measured for it, and forget what was measured of them.

        All processes call this with the same names, and work out the same.
        """
        self.ranks.merge(self.measurements.of(names))
        _, done = transform_layer(self._layer(names), self.solution.plan)
        self.solution.transforms |= done.facts
        self.measurements.forget(names)
        return done

    def _count_tokens(self, names: Iterable[str]) -> None:
        """Note what each module that needs data has seen, in all processes.

        The needed statistic that saw least counts.
        """

        def count(name: str, statistic: Statistic) -> tuple[int, str | None]:
            """Return the tokens, and by what sums of an earlier run are known to be the same."""
            is_left = self.measurements.is_from_earlier_run(name, statistic)
            digest = digest_of(statistic.fields().items()) if is_left else None
            return statistic.num_tokens, digest

        needed = {name: self.measurements.needed(name) for name in names}
        own = [[count(name, each) for each in needed[name]] for name in needed]
        everywhere = self.ranks.share(own)
        for (name, statistics), *counted in zip(needed.items(), *everywhere, strict=True):
            totals = []
            for statistic, *counts in zip(statistics, *counted, strict=True):
                tokens, digests = zip(*counts, strict=True)
                # What an earlier run has left in all processes alike was seen once.
                is_common = digests[0] is not None and len(set(digests)) == 1
                if is_common:
                    statistic.synced.update(statistic.fields())  # not added up again
                totals.append(tokens[0] if is_common else sum(tokens))
            if totals:
                self.solution.coverage.tokens[name] = min(totals)


def transform_layer(layer: Layer, plan: Plan) -> tuple[Layer, Transformed]:
    """Let each step transform the modules of a layer, one after the other.

    What was measured of them follows. Returns the layer as the steps have left it, too.
    """
    total = Transformed()
    for label, planned in plan.transforms.items():
        done = plan.steps[label].transform(layer, planned)
        check_changes(layer, label, Changes(tensors=done.tensors))
        for name, factors in done.divisors.items():
            for base_name in ("input", "weight"):
                layer.measurements.divide(name, base_name, factors)
        layer = replace(layer, new_tensors={**layer.new_tensors, **done.tensors})
        total = total.joined(done)
    return layer, total


@dataclass
class TransformSink:
    """Keeps what transforms make of a model, which gets it before anything else is measured."""

    driver: StepDriver
    tensors: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def take(self, part: Part) -> NewValues:
        """Transform a part; the model stays as it is meanwhile."""
        self.tensors |= self.driver.transform(part.names).tensors
        return NewValues()


@dataclass
class ModelSink:
    """Keeps the changes to a model in memory, which gets them when nothing can fail any more."""

    driver: StepDriver
    changes: Changes = field(default_factory=Changes)

    def take(self, part: Part) -> NewValues:
        """Solve a part; later ones see its new values, unless the model stays as it is for them."""
        if part.stream is None:
            layer, changes = self.driver.solve(part.names, is_final=part.is_final)
        else:
            layer, changes = self.driver.tune(part, self.changes)
        self.changes = self.changes.joined(changes)
        if self.driver.solution.plan.propagation == "float":
            return NewValues()
        tensors = dict(changes.tensors)
        activations = {}
        for module in layer.modules:
            for spec in module.tensors:
                place = module.name, spec.base_name
                qparams = changes.qparams.get(place)
                if spec.base_name != "weight":
                    # One without data is left as it is, unless it follows from each value.
                    is_known = part.stream is not None  # since the module was solved
                    if not is_known and (qparams is not None or spec.args.dynamic is True):
                        quantize = ActivationQuantizer(spec.base_name, spec.args, qparams or {})
                        activations[place] = quantize
                elif qparams is not None:
                    weight = layer.weight(module.name).detach()
                    tensors[place] = fake_quantize(weight, args=spec.args, **qparams)
        return NewValues(tensors, activations)

    def finish(self, batches: Batches, device: torch.device, dtype: torch.dtype | None) -> None:
        """Let steps work on the whole model, all of whose parts were taken."""
        driver = self.driver
        whole = WholeModel(
            driver.model,
            driver.solution.plan.modules,
            self.changes,
            batches,
            device,
            dtype,
            driver.ranks,
            driver.progress,
        )
        self.changes = driver.finish(whole)

    def freeze(self, model: PreTrainedModel) -> None:
        """Give the model all changes; it then computes with fake quantization."""
        modules = self.driver.solution.plan.modules
        give_schemes(model, modules)
        ties = tied_names(model) if self.changes.tensors else {}
        apply_changes(model, modules, self.changes, ties)


@dataclass(frozen=True)
class FoldsSink:
    """Adds up what was measured of the folds of the data, before others solve a part."""

    calibration: Calibration

    def take(self, part: Part) -> NewValues:
        """Add up the folds of a part."""
        self.calibration.add_up(part.names)
        return NewValues()


@dataclass(frozen=True)
class MeasurementsSink:
    """Merges what the processes have measured of each part, and solves nothing."""

    calibration: Calibration
    ranks: Ranks

    def take(self, part: Part) -> NewValues:
        """Merge the statistics of a part, which all processes then have."""
        self.ranks.merge(self.calibration.measured(part.names))
        return NewValues()


def report(solution: SolvedModel) -> None:
    """Warn of what a user must know."""
    for sentence in solution.coverage.sentences():
        warnings.warn(sentence, CalipersWarning, stacklevel=3)
    report_costs(solution.costs)
    notes = solution.notes
    for done in dict.fromkeys(notes.values()):
        text = f"{shortened([name for name in notes if notes[name] == done])}: {done}"
        warnings.warn(CalipersWarning(text), stacklevel=3)


# Changes to a model

# They are checked when a step answers, and applied here alone. A model in memory gets all of them
# at once, when nothing can fail any more; one that goes from disk to disk those of a few modules at
# a time, shortly before they are stored.


def check_changes(layer: Layer, step: str, changes: Changes) -> None:
    """Refuse changes to modules that a step was not given, and values that do not fit.

    :param layer: what the step was given
    """
    for name, tensor in (*changes.qparams, *changes.tensors):
        _check_module(layer, f"{step} changes '{join(name, tensor)}'", name)
    for name in changes.published:
        _check_module(layer, f"{step} publishes attributes of '{name}'", name)
    planned = {(module.name, each.base_name) for module in layer.modules for each in module.tensors}
    for name, tensor in changes.qparams.keys() - planned:
        raise ConfigurationError(
            f"{step} finds parameters of '{join(name, tensor)}', which it did not plan to quantize",
            hint="Name the module and its scheme in StepPlan.modules",
        )
    with disable_onloading():
        for (name, tensor), value in changes.tensors.items():
            what = f"{step} changes '{join(name, tensor)}'"
            module = layer.module(name)
            known = _tensors_of(module)
            if tensor not in known:
                problem = f"{what}, but {type(module).__name__} has no such tensor"
                raise ConfigurationError(problem, allowed=list(known))
            forms = [
                f"{each.dtype} of shape ({listing(map(str, each.shape))})"
                for each in (value, known[tensor])
            ]
            if forms[0] != forms[1]:
                raise ConfigurationError(
                    f"{what} to a value of another form: {forms[0]}",
                    hint=f"It must be {forms[1]}",
                )
    for name, attributes in changes.published.items():
        own = _tensors_of(layer.module(name)).keys() & attributes.keys()
        if own:
            raise ConfigurationError(
                f"{step} publishes '{join(name, min(own))}', which is a tensor of the module",
                hint="Return its new value in Changes.tensors",
            )


def _check_module(layer: Layer, what: str, name: str) -> None:
    if name not in layer.names:
        known = dict(layer.model.named_modules())
        raise ConfigurationError(
            f"{what}, but it was not given this module"
            if name in known
            else f"{what}, but {type(layer.model).__name__} has no such module",
            hint="A step gets the modules that its plan names. Add it to StepPlan.changed. It was "
            f"given {shortened(layer.names, 3)}",
        )


def _tensors_of(module: torch.nn.Module) -> dict[str, Tensor]:
    both: Iterable[tuple[str, Tensor | None]] = (
        (name, tensors[name])
        for tensors in (module._parameters, module._buffers)
        for name in tensors
    )
    return {name: tensor for name, tensor in both if tensor is not None}


def give_schemes(model: torch.nn.Module, modules: Iterable[ModuleSpec]) -> None:
    """Give modules their schemes, and room for the parameters, as compressed-tensors calls them."""
    schemes: dict[int, QuantizationScheme] = {}
    for planned in modules:
        if id(planned.scheme) not in schemes:
            schemes[id(planned.scheme)] = copy.deepcopy(planned.scheme)
        module = model.get_submodule(planned.name)
        expose_states(model, module, planned.kind)
        vars(module)["quantization_scheme"] = schemes[id(planned.scheme)]
        initialize_module_for_quantization(module, force_zero_point=planned.kind != "kv_cache")
        if isinstance(module._parameters, OffloadCache):
            _load_once(module)
        vars(module)["quantization_status"] = QuantizationStatus.FROZEN


def apply_changes(
    model: torch.nn.Module,
    modules: Iterable[ModuleSpec],
    changes: Changes,
    ties: Mapping[str, str],
) -> Mapping[str, Tensor]:
    """Give modules, which have their schemes, the tensors, parameters and attributes of changes.

    Returns the codes of weights, without those of weights that another, tied one has replaced.

    :param modules: those that are quantized, of the ones that are changed
    :param ties: each tied copy, with the tensor that is stored in its place; both become the same
    """
    tied = {
        source: (source, *(copy for copy in ties if ties[copy] == source))
        for source in ties.values()
    }
    codes = dict(changes.codes)
    for (name, local), value in changes.tensors.items():
        module, place = model.get_submodule(name), join(name, local)
        old = module._parameters.get(local)
        if old is None:
            new = value.to(module.get_buffer(local).device)
        else:
            new = torch.nn.Parameter(value.to(old.device), requires_grad=old.requires_grad)
        for one in tied.get(ties.get(place, place), (place,)):
            owner, _, own = one.rpartition(".")
            setattr(model.get_submodule(owner), own, new)
            if own == "weight" and owner != name:
                codes.pop(owner, None)
    for planned in modules:
        module = model.get_submodule(planned.name)
        for tensor in planned.tensors:
            qparams = changes.qparams.get((planned.name, tensor.base_name))
            if qparams is not None:
                store_qparams(module, tensor.base_name, qparams)
            for name in tensor.importance.published:  # they have served
                vars(module).pop(name, None)
    for name, attributes in changes.published.items():
        vars(model.get_submodule(name)).update(attributes)
    return codes


def _load_once(module: Any) -> None:
    """Let the forward of an offloaded module see one weight, not another each time it looks."""
    quantized = module._original_forward_func

    @wraps(quantized)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with disable_offloading():
            return quantized(self, *args, **kwargs)

    module._original_forward_func = forward
