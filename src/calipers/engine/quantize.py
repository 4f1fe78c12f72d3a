"""From the files of a model to those of a quantized checkpoint, without running the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calipers.calibration.coverage import Coverage, UnseenPolicy
from calipers.calibration.lifecycle import freeze
from calipers.calibration.pipelines import usable_device
from calipers.checkpoint.compression import tensor_names
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.loading_progress import loading_counted
from calipers.checkpoint.location import check_location
from calipers.checkpoint.output import check_output
from calipers.checkpoint.reader import (
    load_model,
    load_skeleton,
    load_tokenizer,
    refuse_quantized,
)
from calipers.checkpoint.shards import parse_size
from calipers.checkpoint.source import check_apart, source_folder
from calipers.checkpoint.state import offloaded_tensors
from calipers.checkpoint.stored_weights import LoadedWeights, ModelWeights, StoredWeights
from calipers.checkpoint.ties import tied_names
from calipers.checkpoint.unknown_model import unknown_model
from calipers.checkpoint.writer import TensorStream, write_stream
from calipers.engine.driver import Solution, StepDriver, report_coverage, report_notes
from calipers.engine.job import check_on_unseen, tensors_without_data
from calipers.engine.streaming import SolvedTensors
from calipers.errors import (
    ANY,
    ConfigurationError,
    MeasurementsError,
    ModelLoadError,
    Option,
    counted,
    no_meaning,
)
from calipers.files.safetensors_header import StoredTensor
from calipers.judging.costs import ModuleCosts, report_costs
from calipers.measurements import Measurements
from calipers.notebook import NotebookView
from calipers.options import (
    ComputeOptions,
    OutputOptions,
    QuantizeKeywords,
    QuantizeOptions,
    RecipeOptions,
)
from calipers.planning.from_measurements import derived_measurements
from calipers.planning.plan import Changes, Plan
from calipers.recipes import Recipe, load_changed_recipe
from calipers.recipes.compiling import plan_for
from calipers.runtime.launch import find_launch
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import SingleProcess
from calipers.steps.feedback import CurvatureCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack


@dataclass(frozen=True)
class QuantizeResult(NotebookView):
    """What ``quantize`` did.

    :param plan: what was quantized, how, and by which observers
    :param coverage: how many tokens each module saw when it was measured
    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param recipe: the recipe, as it was carried out
    :param output_dir: where the checkpoint is
    :param dtype: that of the model
    :param source: the folder of the model, if it is at hand
    :param costs: module → what its static activations and its output lose, where it was measured
    :param notes: module → what was done otherwise than the recipe says, and why
    """

    plan: Plan
    coverage: Coverage
    errors: Mapping[str, float]
    recipe: Recipe
    output_dir: Path
    dtype: torch.dtype
    source: Path | None = None
    costs: Mapping[str, ModuleCosts] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        facts = (f"{key}: {fact}" for key, fact in self.facts().items())
        return f"QuantizeResult({', '.join(facts)})"

    def facts(self) -> dict[str, object]:
        """Return what matters most, by its name."""
        facts: dict[str, object] = {"plan": self.plan}
        if self.errors:
            facts["largest error of a weight"] = f"{max(self.errors.values()):.2%}"
        return {**facts, "written to": self.output_dir}


def quantize(
    model: str | Path,
    recipe: Any,
    measurements: Measurements | str | Path | None = None,
    output_dir: str | Path | None = None,
    *,
    on_unseen: UnseenPolicy = "error",
    compute: ComputeOptions | None = None,
    changes: RecipeOptions | None = None,
    output: OutputOptions | None = None,
    **keywords: Unpack[QuantizeKeywords],
) -> QuantizeResult:
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
    given = {**keywords, **place}
    options = QuantizeOptions.merged(given, compute=compute, changes=changes, output=output)
    job = _QuantizeJob(options, on_unseen, Progress.of(options.compute.progress))
    parsed, seen = job.read(model, recipe, measurements)
    with job.progress.waiting("reading the model") as begin, loading_counted(begin):
        prepared = prepare_model(
            model,
            parsed,
            seen,
            on_unseen=on_unseen,
            trust_remote_code=options.compute.trust_remote_code,
            output_dir=options.output.output_dir,
        )
    return job.write(prepared, parsed, seen)


@dataclass(frozen=True)
class PreparedModel:
    """A model whose modules have their schemes, and what solves them."""

    model: PreTrainedModel
    driver: StepDriver
    weights: ModelWeights
    fingerprint: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the modules that are quantized."""
        return tuple(self.driver.solution.plan.names)

    def solved_tensors(
        self, device: torch.device | str | None, progress: Progress
    ) -> SolvedTensors:
        """Return what becomes of its tensors; solvers work on the device."""
        place = usable_device(device) or torch.device("cpu")
        names = tensor_names(self.model)
        return SolvedTensors(self.model, names, self.weights, self.driver, place, progress)


def prepare_model(
    name: str | Path,
    recipe: Recipe,
    seen: Measurements | None,
    *,
    on_unseen: UnseenPolicy = "error",
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
    stored, ties = _stored(name, skeleton), tied_names(skeleton)
    own = StoredWeights.of(skeleton, stored, ties, offloaded_tensors(skeleton))
    if own is not None:
        fingerprint = own.fingerprint()
        _check_same_model(fingerprint, seen)
        driver, names = _planned(skeleton, recipe, seen, on_unseen, curvatures)
        weights = StoredWeights.of(skeleton, stored, ties, names)
        if weights is not None:
            return PreparedModel(skeleton, driver, weights, fingerprint)
    model = load_model(name, trust_remote_code=trust_remote_code)
    fingerprint = LoadedWeights(model, frozenset()).fingerprint()
    _check_same_model(fingerprint, seen)
    driver, names = _planned(model, recipe, seen, on_unseen, curvatures)
    return PreparedModel(model, driver, LoadedWeights(model, names), fingerprint)


def _planned(
    model: PreTrainedModel,
    recipe: Recipe,
    seen: Measurements | None,
    on_unseen: UnseenPolicy,
    curvatures: CurvatureCache | None,
) -> tuple[StepDriver, frozenset[str]]:
    """Plan, and give modules their schemes; also return the names of all tensors before."""
    plan = plan_for(model, recipe)
    needing = tensors_without_data(plan, model)
    if seen is None and needing:
        raise _no_measurements(needing)
    known = Measurements() if seen is None else derived_measurements(plan, seen)
    solution = Solution(plan, Coverage(on_unseen))
    driver = StepDriver(model, known, solution, SingleProcess(), Progress(False), curvatures)
    driver.prepare(tuple(plan.names))
    names = frozenset(offloaded_tensors(model))
    freeze(model, solution.plan, Changes())
    return driver, names


@dataclass(frozen=True)
class _QuantizeJob:
    """The parts of a call, in their order."""

    options: QuantizeOptions
    on_unseen: UnseenPolicy
    progress: Progress

    def read(
        self, model: str | Path, recipe: Any, measurements: Any
    ) -> tuple[Recipe, Measurements | None]:
        """Read the arguments, and refuse what cannot be meant."""
        output = self.options.output
        self._check()
        inputs = {"model": model, "recipe": recipe, "measurements": measurements}
        check_output(output.output_dir or "", output.overwrite, inputs)
        parsed = load_changed_recipe(recipe, **self.options.changes.values())
        is_file = isinstance(measurements, (str, Path))
        seen = Measurements.load(measurements) if is_file else measurements
        if seen is None:
            return parsed, None
        check_complete(seen)
        return parsed.on_float_inputs(), seen

    def _check(self) -> None:
        output, compute = self.options.output, self.options.compute
        if output.output_dir is None:
            problem = "There is no place for the checkpoint"
            raise ConfigurationError(problem, hint="Pass " + Option("output_dir", ANY))
        check_on_unseen(self.on_unseen)
        if compute.gives("dtype") and compute.dtype != "auto":
            raise no_meaning("dtype", compute.dtype, "a model that does not run")
        parse_size(output.max_shard_size)
        usable_device(compute.device)
        processes = find_launch().world_size
        if processes > 1:
            raise ConfigurationError(
                f"Going from disk to disk is work for one process, and this is one of {processes}",
                hint="Start it by itself, or calibrate with data, which all of them share.",
            )

    def write(
        self, prepared: PreparedModel, recipe: Recipe, seen: Measurements | None
    ) -> QuantizeResult:
        """Carry the plan out while the checkpoint is written."""
        output, model, solution = self.options.output, prepared.model, prepared.driver.solution
        solved = prepared.solved_tensors(self.options.compute.device, self.progress)
        way, amount = "datafree", (0, 0)
        if seen is not None and seen.info is not None:
            way, amount = "measurements", (len(seen.info.samples), seen.info.tokens)
        stream = TensorStream(
            solved.tensors,
            lambda: solution.as_notes(way, *amount),
            self._arguments(prepared, recipe, seen),
            solved.state,
        )
        path = write_stream(
            model,
            tensor_names(model),
            stream,
            output.output_dir or "",
            recipe=recipe.to_yaml(),
            # Of a model in GGUF there are no files of a tokenizer to copy.
            tokenizer=None if source_folder(model) is not None else load_tokenizer(None, model),
            overwrite=output.overwrite,
            max_shard_size=output.max_shard_size,
        )
        report_coverage(solution.coverage)
        report_costs(solution.costs)
        report_notes(solution.changes.notes)
        return QuantizeResult(
            solution.plan,
            solution.coverage,
            solution.errors,
            recipe,
            path,
            model.dtype,
            source_folder(model),
            solution.costs,
            solution.changes.notes,
        )

    def _arguments(
        self, prepared: PreparedModel, recipe: Recipe, seen: Measurements | None
    ) -> dict[str, Any]:
        """Return what a run that goes on has in common with the one before it."""
        return {
            "calipers": version("calipers"),
            "model": prepared.fingerprint,
            "recipe": recipe.to_yaml(),
            "measurements": None if seen is None else seen.digest(),
            "on_unseen": self.on_unseen,
            "max_shard_size": parse_size(self.options.output.max_shard_size),
        }


def skeleton_for(name: str | Path, recipe: Recipe, trusted: bool) -> PreTrainedModel:
    """Build a model without values, as transformers has it; else as the names in its files say."""
    check_location(str(name), gguf=True)
    unknown = unknown_model(Path(name)) if Path(name).is_dir() else None
    if unknown is None:
        return load_skeleton(name, trust_remote_code=trusted)
    refuse_quantized(unknown.config, str(name))
    for modifier in recipe.modifiers:
        unknown.check_patterns([pattern for part in modifier.aimed_at() for pattern in part])
    return unknown


def _stored(name: str | Path, model: PreTrainedModel) -> dict[str, StoredTensor]:
    """Return the tensors in the files of a model; none where they are not all at hand."""
    folder = source_folder(model)
    if folder is None:
        return {}
    if Path(name).is_dir():
        return stored_tensors(folder)
    with suppress(ModelLoadError):  # of a name on the hub, whatever is missing is downloaded
        return stored_tensors(folder)
    return {}


def check_complete(seen: Measurements) -> None:
    """Refuse measurements of a run that has not finished."""
    if seen.info is None or not seen.info.is_complete:
        raise MeasurementsError(
            "are not those of a finished run",
            subject="The measurements",
            hint="Let 'calipers measure' finish: with the same arguments it goes on where it was.",
        )


def _check_same_model(fingerprint: str, seen: Measurements | None) -> None:
    """Refuse measurements of another model, or of another state of its weights."""
    if seen is None or seen.info is None or seen.info.fingerprint == fingerprint:
        return
    raise MeasurementsError(
        f"are of another model, or of other weights of it: {seen.info.model} with the fingerprint "
        f"{seen.info.fingerprint[:8]}, and this one has {fingerprint[:8]}",
        subject="The measurements",
        hint="Measure this model, or quantize the one that was measured.",
    )


def _no_measurements(tensors: Sequence[str]) -> ConfigurationError:
    """Refuse a plan that needs data where there are no measurements."""
    return ConfigurationError(
        f"The recipe needs data for {counted(len(tensors), 'tensor')} (the first is {tensors[0]}), "
        "and there are no " + Option("measurements"),
        hint="Pass "
        + Option("measurements", ANY)
        + ", which 'calipers measure' makes, or "
        + Option("dataset", ANY)
        + " (to oneshot, in Python); or choose dynamic activations and observers that look at "
        "weights alone",
    )
