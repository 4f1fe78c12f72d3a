"""From the files of a model to those of a quantized checkpoint, without running the model."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calipers.calibration.coverage import Coverage
from calipers.checkpoint.auxiliary_files import check_apart, source_folder
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.location import check_location, refuse_quantized
from calipers.checkpoint.reader import (
    load_model,
    load_skeleton,
    load_tokenizer,
    loading_counted,
)
from calipers.checkpoint.state import offloaded_tensors, tied_names
from calipers.checkpoint.stored_weights import LoadedWeights, StoredWeights, model_fingerprint
from calipers.checkpoint.unknown_model import unknown_model
from calipers.checkpoint.writer import TensorStream, parse_size, write_stream
from calipers.engine.job import (
    check_not_running,
    data_missing,
    read_arguments,
    tensors_without_data,
)
from calipers.engine.loop import OneshotResult, Solution, StepDriver, give_schemes, report
from calipers.engine.streaming import CheckpointSink, PreparedModel
from calipers.errors import ANY, ConfigurationError, MeasurementsError, ModelLoadError, Option
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
from calipers.recipes import Recipe
from calipers.recipes.compiling import plan_for
from calipers.runtime.precision import usable_device
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import SingleProcess
from calipers.solvers.gptq import CurvatureCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack


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
    missing = tensors_without_data(plan, model)
    if seen is None and missing:
        remedy = "Pass " + Option("measurements", ANY) + ", which 'calipers measure' makes, or "
        remedy += Option("dataset", ANY) + " (to oneshot, in Python)"
        raise data_missing(missing, "there are no " + Option("measurements"), remedy)
    known = Measurements() if seen is None else derived_measurements(plan, seen)
    solution = Solution(plan, Coverage(on_unseen))
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
    """Build a model without values, as transformers has it; else as the names in its files say."""
    check_location(str(name), gguf=True)
    unknown = unknown_model(Path(name)) if Path(name).is_dir() else None
    if unknown is None:
        return load_skeleton(name, trust_remote_code=trusted)
    refuse_quantized(unknown.config, str(name))
    for modifier in recipe.modifiers:
        unknown.check_patterns([pattern for part in modifier.target_patterns() for pattern in part])
    return unknown
