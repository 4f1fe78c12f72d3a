"""From the files of a model to those of a quantized checkpoint, without running the model.

Some modules at a time are read, solved, and stored or judged.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calipers.calibration.coverage import Coverage
from calipers.calibration.partial_forward import NewValues
from calipers.calibration.pipelines import Part, Parts
from calipers.checkpoint.auxiliary_files import check_apart, source_folder
from calipers.checkpoint.compression import compressed_state, name_on_disk, tensor_names
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.location import refuse_quantized
from calipers.checkpoint.reader import (
    load_model,
    load_tokenizer,
    loading_counted,
)
from calipers.checkpoint.state import (
    join,
    module_state,
    offloaded_tensors,
    own_modules,
    tied_names,
)
from calipers.checkpoint.stored_weights import (
    LoadedWeights,
    StoredWeights,
    WeightSource,
    model_fingerprint,
)
from calipers.checkpoint.unknown_model import UnknownModel, skeleton_of
from calipers.checkpoint.writer import TensorStream, in_background, parse_size, write_stream
from calipers.engine.dry_run import hessian_bytes
from calipers.engine.job import (
    check_not_running,
    data_missing,
    read_arguments,
    tensors_without_data,
)
from calipers.engine.loop import (
    OneshotResult,
    SolvedModel,
    StepDriver,
    apply_changes,
    give_schemes,
    report,
    run_parts,
)
from calipers.errors import (
    ANY,
    ConfigurationError,
    MeasurementsError,
    ModelLoadError,
    Option,
    shortened,
)
from calipers.judging.costs import ModuleCosts
from calipers.kernels.resources import FreedMemory, kernels_only
from calipers.measurements import Measurements
from calipers.options import (
    CalibrationOptions,
    ComputeOptions,
    OneshotOptions,
    OnUnseen,
    OutputOptions,
    QuantizeKeywords,
    QuantizeOptions,
    RecipeOptions,
)
from calipers.planning.measuring import derived_measurements
from calipers.planning.plan import Changes
from calipers.planning.specs import ModuleSpec
from calipers.recipes import Recipe
from calipers.recipes.compiling import plan_for
from calipers.runtime.precision import usable_device
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import SingleProcess
from calipers.solvers.gptq import CurvatureCache
from calipers.topology.model import Topology
from calipers.topology.names import fused_groups, grouped

if TYPE_CHECKING:
    from typing_extensions import Unpack


_StoredTensor = tuple[int, str, str, Tensor]
"""The place of a module in the model, its name, the name of a tensor on disk, and the tensor."""


def quantize(
    model: str | Path,
    recipe: Any,
    measurements: Measurements | str | Path | None = None,
    output_dir: str | Path | None = None,
    *,
    on_unseen: OnUnseen = "error",
    compute: ComputeOptions | None = None,
    changes: RecipeOptions | None = None,
    output: OutputOptions | None = None,
    **keywords: Unpack[QuantizeKeywords],
) -> OneshotResult:
    """Quantize the files of a model as a recipe says, without running the model.

    Weights are read, solved, packed and written one after the other: what is in memory at a time
    does not depend on the size of the model. What a recipe needs to know of data comes from
    measurements. A run that was killed goes on with the same call: finished files are kept. One
    process does it, with all its threads.

    :param model: the folder of the model, or its name on the hub. Where the files are not at hand,
        or do not hold the weights as the model has them, the model is loaded as a whole
    :param recipe: a file, a YAML string, a preset such as ``"W4A16"``, or modifiers
    :param measurements: what :func:`calipers.measure` has found of this model, or the file of it;
        needed if the recipe needs data. GPTQ then works on what the model computes as it is
        (``error_propagation: float``)
    :param output_dir: where the checkpoint goes
    :param on_unseen: what becomes of modules that no token reached: ``error``, ``weights_only`` or
        ``peers``
    :param compute: on which device solvers work, and whether progress is shown:
        :class:`calipers.options.ComputeOptions`
    :param changes: what is put on top of the recipe: :class:`calipers.options.RecipeOptions`
    :param output: how the checkpoint is cut: :class:`calipers.options.OutputOptions`
    :param keywords: the options of all groups, one by one: ``overwrite``, ``weight_observer``, …
    """
    place = {} if output_dir is None else {"output_dir": output_dir}
    groups = QuantizeOptions.merged(
        {**keywords, **place}, compute=compute, changes=changes, output=output
    )
    options = OneshotOptions(
        compute=groups.compute,
        calibration=CalibrationOptions(on_unseen=on_unseen),
        changes=groups.changes,
        output=groups.output,
    )
    if options.output.output_dir is None:
        problem = "There is no place for the checkpoint"
        raise ConfigurationError(problem, hint="Pass " + Option("output_dir", ANY))
    check_not_running(options)
    return quantize_files(model, recipe, measurements, options)


def quantize_files(
    model: str | Path, recipe: Any, measurements: Any, options: OneshotOptions
) -> OneshotResult:
    """Go from the files of a model to those of its checkpoint."""
    start = time.monotonic()
    recipe, seen = read_arguments(model, recipe, None, measurements, options)
    progress, output = Progress.of(options.compute.progress), options.output
    trusted = options.compute.trust_remote_code
    with progress.waiting("reading the model") as begin, loading_counted(begin):
        prepared = prepare_model(
            model,
            recipe,
            seen,
            on_unseen=options.calibration.on_unseen,
            trust_remote_code=trusted,
            output_dir=output.output_dir,
        )
        loaded, given = prepared.model, options.data.tokenizer
        tokenizer = None
        # Of a model in GGUF there are no files of a tokenizer to copy.
        if given is not None or source_folder(loaded) is None:
            tokenizer = load_tokenizer(given, loaded, trust_remote_code=trusted)
    prepared.device = usable_device(options.compute.device) or prepared.device
    sink, solution = CheckpointSink(prepared, progress), prepared.driver.solution
    common = {
        "calipers": version("calipers"),
        "model": prepared.fingerprint,
        "recipe": recipe.to_yaml(),
        "measurements": None if seen is None else seen.digest(),
        "on_unseen": options.calibration.on_unseen,
        "max_shard_size": parse_size(output.max_shard_size),
    }
    assert output.output_dir is not None
    path = write_stream(
        loaded,
        sink.names,
        TensorStream(sink.tensors, solution.provenance, common, sink.state),
        output.output_dir,
        recipe=recipe.to_yaml(),
        tokenizer=tokenizer,
        overwrite=output.overwrite,
        max_shard_size=output.max_shard_size,
    )
    report(solution)
    return OneshotResult(
        **vars(solution),
        model=loaded,
        recipe=recipe,
        output_dir=path,
        seconds=time.monotonic() - start,
    )


def prepare_model(
    name: str | Path,
    recipe: Recipe,
    seen: Measurements | None,
    *,
    on_unseen: OnUnseen = "error",
    trust_remote_code: bool = False,
    output_dir: str | Path | None = None,
    curvatures: CurvatureCache | None = None,
) -> PreparedModel:
    """Plan for a model as its files have it; load it where they have it otherwise.

    :param output_dir: where a checkpoint is to go, which must not be where the model is
    :param curvatures: factorised Hessians, shared by models that are solved side by side
    """
    skeleton = skeleton_for(name, recipe, trust_remote_code)
    if output_dir is not None:
        check_apart(output_dir, skeleton)
    stored, ties = {}, tied_names(skeleton)
    folder = source_folder(skeleton)
    if folder is not None:
        # Of a name on the hub, whatever is missing is downloaded.
        with nullcontext() if Path(name).is_dir() else suppress(ModelLoadError):
            stored = stored_tensors(folder)

    def with_schemes(model: PreTrainedModel, fingerprint: str) -> tuple[StepDriver, frozenset[str]]:
        """Plan, and give modules their schemes; also return the names of all tensors before."""
        driver = driver_for(
            model,
            fingerprint,
            recipe,
            seen,
            on_unseen,
            curvatures,
            keep_codes=output_dir is not None,
        )
        driver.settle(driver.solution.plan.names)
        names = frozenset(offloaded_tensors(model))
        give_schemes(model, driver.solution.plan.modules)
        return driver, names

    own = StoredWeights.of(skeleton, stored, ties, offloaded_tensors(skeleton))
    if own is not None:
        fingerprint = own.fingerprint()
        driver, names = with_schemes(skeleton, fingerprint)
        weights = StoredWeights.of(skeleton, stored, ties, names)
        if weights is not None:
            return PreparedModel(skeleton, driver, weights, fingerprint)
    model = load_model(name, trust_remote_code=trust_remote_code)
    fingerprint = model_fingerprint(model)
    driver, names = with_schemes(model, fingerprint)
    return PreparedModel(model, driver, LoadedWeights(model, names), fingerprint)


def driver_for(
    model: PreTrainedModel,
    fingerprint: str,
    recipe: Recipe,
    seen: Measurements | None,
    on_unseen: OnUnseen,
    curvatures: CurvatureCache | None = None,
    progress: Progress | None = None,
    *,
    keep_codes: bool = False,
) -> StepDriver:
    """Plan for a model that does not run, and return what solves it from measurements, if any.

    Measurements of another model, or of another state of its weights, are refused.
    """
    if seen is not None and seen.info is not None and seen.info.fingerprint != fingerprint:
        raise MeasurementsError(
            f"are of another model, or of other weights of it: {seen.info.model} with the "
            f"fingerprint {seen.info.fingerprint[:8]}, and this one has {fingerprint[:8]}",
            subject="The measurements",
            hint="Measure this model, or quantize the one that was measured.",
        )
    plan = plan_for(model, recipe)
    if plan.finishing:
        raise ConfigurationError(
            "works on a whole model that data runs through, and here none runs",
            subject=plan.finishing[0],
            hint="Pass "
            + Option("dataset", ANY)
            + " to oneshot and no measurements, or take the step out of the recipe",
        )
    missing = tensors_without_data(plan, model)
    if seen is None and missing:
        remedy = "Pass " + Option("measurements", ANY) + ", which 'calipers measure' makes, or "
        remedy += Option("dataset", ANY) + " (to oneshot, in Python)"
        raise data_missing(missing, "there are no " + Option("measurements"), remedy)
    known = Measurements() if seen is None else derived_measurements(plan, seen)
    solution = SolvedModel(plan, Coverage(on_unseen))
    if seen is not None and seen.info is not None:
        solution.pipeline = "measurements"
        solution.samples, solution.tokens = len(seen.info.samples), seen.info.tokens
    return StepDriver(
        model,
        known,
        solution,
        SingleProcess(),
        progress or Progress(False),
        curvatures,
        keep_codes,
    )


def skeleton_for(name: str | Path, recipe: Recipe, trusted: bool) -> PreTrainedModel:
    """Build a model without values; of an unknown one a recipe must mean modules by their names."""
    skeleton = skeleton_of(name, trust_remote_code=trusted)
    if isinstance(skeleton, UnknownModel):
        refuse_quantized(skeleton.config, str(name))
        for modifier in recipe.modifiers:
            skeleton.check_patterns(chain(*modifier.target_patterns()))
    return skeleton


@dataclass
class PreparedModel:
    """A model whose modules have their schemes, and whose tensors may have no values.

    :param weights: where the values come from
    :param device: where modules are solved
    """

    model: PreTrainedModel
    driver: StepDriver
    weights: WeightSource
    fingerprint: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def modules(self) -> dict[str, ModuleSpec]:
        """The modules that are quantized, by their names."""
        return {module.name: module for module in self.driver.solution.plan.modules}

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """Each tied copy, with the tensor it is tied to."""
        return tied_names(self.model)

    @cached_property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """Each module of the plan, with those that are solved and stored together with it.

        These are the ones that share its input. A step that changes others, such as norms, may have
        to see them beside the modules they feed: it gets whole decoder layers.
        """
        plan = self.driver.solution.plan
        groups = fused_groups(module.name for module in plan.modules if module.kind == "linear")
        if plan.changed or plan.transforms:
            topology = Topology.of(self.model)
            groups = grouped(plan.names, lambda name: topology.layer_of(name) or name)
        parts: dict[str, tuple[str, ...]] = {name: (name,) for name in plan.names}
        for group in groups:
            parts |= dict.fromkeys(group, group)
        for group in (g for each in plan.transforms.values() for g in each.together):
            joined = tuple(dict.fromkeys(other for name in group for other in parts[name]))
            parts |= dict.fromkeys(joined, joined)
        for pair in self.ties.items():  # what is changed under one name is stored under the other
            owners = [name.rpartition(".")[0] for name in pair]
            if not set(plan.changed).isdisjoint(owners):
                part = dict.fromkeys(other for name in owners for other in parts.get(name, (name,)))
                parts |= dict.fromkeys(part, tuple(part))
        return parts

    def read_parts(self, first: int = 0) -> Parts:
        """Read the tensors of each part, the next one while one is at work.

        :param first: the first module, in the order of the model, whose part is read
        """
        planned, seen = set(self.driver.solution.plan.names), set[str]()

        def read() -> Generator[Part, None, None]:
            for number, (name, _) in enumerate(own_modules(self.model)):
                wanted = [each for each in self.parts.get(name, ()) if each not in seen]
                if number >= first and wanted:
                    seen.update(wanted)
                    names = tuple(filter(planned.__contains__, wanted))
                    yield Part(names, {each: self.read(each) for each in wanted})

        yield from in_background(read())

    def read(self, name: str) -> dict[str, Tensor]:
        """Read the tensors that a module has on disk; the parameters of a scheme are not there."""
        state = module_state(self.model.get_submodule(name))
        places = {local: join(name, local) for local in state}
        if name in self.parts:  # what is stored for a tied copy has the name of the other one
            places = {local: self.ties.get(place, place) for local, place in places.items()}
        return {local: self.weights.read(n) for local, n in places.items() if self.weights.has(n)}

    @contextmanager
    def solved(self, part: Part) -> Iterator[Changes]:
        """Give modules their values, and solve them.

        Threads are left to kernels, unless large matrices are multiplied, which torch does.
        """
        tensors = (tensor for module in self.modules.values() for tensor in module.tensors)
        has_matrices = any(tensor.importance.uses_products for tensor in tensors)
        with torch.no_grad(), nullcontext() if has_matrices else kernels_only():
            for name, state in part.states.items():
                module = self.model.get_submodule(name)
                for local, old in module_state(module).items():
                    if local in state or old.is_meta:
                        empty = torch.zeros_like
                        new = state[local] if local in state else empty(old, device=self.device)
                        _replace(module, local, new.to(self.device, old.dtype))
            yield self.driver.solve(part.names)[1]

    def empty(self, name: str) -> None:
        """Take the values of a module away; their shapes stay."""
        module = self.model.get_submodule(name)
        for local, old in module_state(module).items():
            _replace(module, local, old.detach().to("meta"))

    def bytes_of_work(self, part: Part) -> int:
        """Return the memory that solving a part took for the time being, about."""
        return hessian_bytes([self.modules[name] for name in part.states if name in self.modules])


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    old = module._parameters.get(name)
    if old is None:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, old.requires_grad)


class CheckpointSink:
    """Makes the tensors of a checkpoint; reading, solving and writing go on at the same time."""

    def __init__(self, prepared: PreparedModel, progress: Progress) -> None:
        self.names = tensor_names(prepared.model)
        self._prepared, self._progress = prepared, progress
        self._order = list(own_modules(prepared.model))
        self._next = 0  # the module whose tensors come next
        self._compressed: dict[str, dict[str, Tensor]] = {}
        self._numbers: dict[str, int] = {}
        self._freed = FreedMemory()

    def tensors(self, state: Mapping[str, Any]) -> Generator[tuple[str, Tensor], None, None]:
        """Give the tensors with their names on disk.

        :param state: what ``state`` has returned in a run that was killed
        """
        self._next = self._restore(state)
        left = set(self._prepared.modules)
        with (
            self._progress.counting("quantizing", len(left), "modules") as add,
            closing(in_background(self._stored())) as stored,
        ):
            for number, module, name, tensor in stored:
                self._numbers[name] = number
                if module in left:
                    left.remove(module)
                    add(1)
                yield name, tensor
        yield from self._prepared.weights.converted()

    def state(self, name: str) -> dict[str, Any]:
        """Return what must be known to go on behind a tensor."""
        solution = self._prepared.driver.solution
        return {
            "module": self._numbers.get(name, len(self._order)),
            "errors": solution.errors.copy(),
            "costs": {name: asdict(each) for name, each in solution.costs.copy().items()},
            "notes": solution.notes.copy(),
            "transforms": solution.transforms.copy(),
        }

    def _restore(self, state: Mapping[str, Any]) -> int:
        """Take up what an earlier run knew, and return the first module that it had not done."""
        if not state:
            return 0
        solution = self._prepared.driver.solution
        solution.errors |= state["errors"]
        costs = state["costs"].items()
        solution.costs |= {name: ModuleCosts.from_dict(each) for name, each in costs}
        solution.notes |= state["notes"]
        solution.transforms |= state.get("transforms", {})
        return int(state["module"])

    def take(self, part: Part) -> NewValues:
        """Solve a part, and keep what is stored of each of its modules."""
        prepared, converted = self._prepared, self.names.converted
        with prepared.solved(part) as changes:
            lost = [join(*place) for place in changes.tensors if join(*place) in converted]
            if lost:
                raise ConfigurationError(
                    "The recipe changes tensors that checkpoints of this model hold in another "
                    f"form: {shortened(lost, 3)}",
                    hint="Load the model with transformers, and pass it to calipers.oneshot",
                )
            quantized = [prepared.modules[n] for n in part.states if n in prepared.modules]
            codes = apply_changes(prepared.model, quantized, changes, prepared.ties)
            for name in part.states:
                module = prepared.model.get_submodule(name)
                self._compressed[name] = compressed_state(module, codes.get(name))
                prepared.empty(name)
        self._freed.count(prepared.bytes_of_work(part))
        return NewValues()

    def _stored(self) -> Generator[_StoredTensor, None, None]:
        """Solve the model part by part, and give what is stored in the order of its modules."""
        for _ in run_parts(self._prepared.read_parts(self._next), self):
            yield from self._ready()
        yield from self._ready()

    def _ready(self) -> Iterator[_StoredTensor]:
        """Give the tensors of the next modules, as far as they are solved."""
        while self._next < len(self._order):
            name, module = self._order[self._next]
            if name not in self._prepared.parts:
                state = self._prepared.read(name)
            elif name in self._compressed:
                state = self._compressed.pop(name)
            else:
                return
            for local, tensor in state.items():
                stored = name_on_disk(self.names, name, module, local)
                if stored is not None:
                    yield self._next, name, stored, tensor
            self._freed.count(sum(tensor.nbytes for tensor in state.values()))
            self._next += 1
