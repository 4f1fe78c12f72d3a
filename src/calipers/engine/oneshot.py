"""From a model, a recipe and data to a quantized checkpoint, in one call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calipers.calibration.context import Calibration, unchanged_on_error
from calipers.calibration.coverage import Coverage, EarlyLook
from calipers.calibration.data import Batches
from calipers.calibration.pipelines import Part, Run
from calipers.calibration.whole_model import check_whole_model
from calipers.checkpoint.auxiliary_files import source_folder
from calipers.checkpoint.state import tied_names
from calipers.checkpoint.stored_weights import model_fingerprint
from calipers.checkpoint.writer import write_checkpoint
from calipers.engine.job import (
    Job,
    data_missing,
    read_arguments,
    tensors_without_data,
)
from calipers.engine.loop import (
    PIPELINES,
    FoldsSink,
    ModelSink,
    OneshotResult,
    SolvedModel,
    StepDriver,
    TransformSink,
    apply_changes,
    report,
    run_parts,
)
from calipers.engine.quantize import driver_for, quantize_files
from calipers.errors import ANY, Option, Text
from calipers.measurements import Measurements
from calipers.options import (
    CalibrationOptions,
    ComputeOptions,
    DataOptions,
    OneshotKeywords,
    OneshotOptions,
    OutputOptions,
    Pipeline,
    RecipeOptions,
)
from calipers.planning.plan import Changes, Plan, TransformPlan
from calipers.recipes import Recipe
from calipers.recipes.compiling import plan_for
from calipers.runtime.distributed import joined_ranks
from calipers.runtime.environment import find_launch
from calipers.runtime.precision import dtype_choice
from calipers.runtime.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack


_BATCH_TOKENS = 2048  # of batches of like samples: beyond, larger ones are no faster


def oneshot(
    model: PreTrainedModel | str | Path,
    recipe: Any,
    dataset: Any = None,
    *,
    measurements: Measurements | str | Path | None = None,
    data: DataOptions | None = None,
    compute: ComputeOptions | None = None,
    calibration: CalibrationOptions | None = None,
    changes: RecipeOptions | None = None,
    output: OutputOptions | None = None,
    **keywords: Unpack[OneshotKeywords],
) -> OneshotResult:
    """Quantize a model as a recipe says, and write a checkpoint that transformers and vLLM load.

    A model given by its path or name goes from disk to disk where no dataset is given, as
    :func:`calipers.quantize` does it: it is not loaded as a whole, and the same call goes on with
    one that was killed. Without ``output_dir``, or in several processes, it is loaded.

    A model given as an object is changed: afterwards it is frozen. If anything fails, it is left as
    it was, and no output is left. Under ``torchrun`` every process calls this with the same
    arguments; each takes its share of the data and of the work, and the first one writes. The
    process group is made, and ended, here, unless there is one already.

    :param model: a transformers model, or the path or name to load one from
    :param recipe: a file, a YAML string, a preset such as ``"W4A16"``, or modifiers
    :param dataset: a file (text, JSONL, Parquet), a data set by name (``ORG/NAME[@CONFIG][:SPLIT]``
        on the hub, or a folder), texts, token ids, a ``datasets`` object or a DataLoader; needed if
        the plan needs data
    :param measurements: what :func:`calipers.measure` has found of this model, or the file of it,
        instead of a dataset
    :param data: which samples are taken: :class:`calipers.options.DataOptions`
    :param compute: where the model computes, and in which dtype:
        :class:`calipers.options.ComputeOptions`
    :param calibration: how data runs through it: :class:`calipers.options.CalibrationOptions`
    :param changes: what is put on top of the recipe: :class:`calipers.options.RecipeOptions`
    :param output: where the checkpoint goes: :class:`calipers.options.OutputOptions`
    :param keywords: the options of all groups, one by one: ``output_dir``,
        ``num_calibration_samples``, ``weight_observer``, …
    """
    options = OneshotOptions.merged(
        keywords,
        data=data,
        compute=compute,
        calibration=calibration,
        changes=changes,
        output=output,
    )
    into = options.output.output_dir
    is_written = dataset is None and into is not None
    if isinstance(model, (str, Path)) and is_written and find_launch().world_size == 1:
        # Nothing runs and nobody gets the model: it need not be loaded.
        return quantize_files(model, recipe, measurements, options)
    start = time.monotonic()
    with joined_ranks(options.calibration.timeout) as ranks:
        wanted = options.compute.progress if ranks.rank == 0 else False
        job = _OneshotJob(options, ranks, Progress.of(wanted))
        recipe, seen = job.read(model, recipe, dataset, measurements)
        with job.loaded(model, apart_from=into) as (loaded, tokenizer), unchanged_on_error(loaded):
            if seen is None:
                sink = job.measure_and_solve(loaded, recipe, dataset, tokenizer)
            else:
                sink = job.solve_measured(loaded, recipe, seen)
            solution = sink.driver.solution
            if ranks.rank == 0:
                report(solution)
            job.write(loaded, tokenizer, recipe, sink)
    return OneshotResult(
        **vars(solution),
        model=loaded,
        recipe=recipe,
        output_dir=None if into is None else Path(into),
        seconds=time.monotonic() - start,
    )


def _passes(plan: Plan) -> Iterator[dict[str, TransformPlan]]:
    """Put transforms together that one run of the data is enough for.

    What was measured follows where channels are divided; after other changes it is measured anew.
    """
    together: dict[str, TransformPlan] = {}
    for label, transform in plan.transforms.items():
        follows = all(exact for each in together.values() for exact in each.affected.values())
        if transform.measured and not follows:
            yield together
            together = {}
        together[label] = transform
    if together:
        yield together


@dataclass(frozen=True)
class _OneshotJob(Job):
    """The parts of a call, in the order in which all processes take them."""

    options: OneshotOptions

    def read(
        self, model: Any, recipe: Any, dataset: Any, measurements: Any
    ) -> tuple[Recipe, Measurements | None]:
        """Read the arguments, which must be the same in all processes."""
        options, changes = self.options, self.options.changes
        with self.ranks.step("reading the arguments"):
            read, seen = read_arguments(model, recipe, dataset, measurements, options)
        self.ranks.agree(
            {
                "method": changes.method,
                "recipe": read.to_yaml(),
                "allow_code": changes.allow_code,
                "pipeline": options.calibration.pipeline,
                "on_unseen": options.calibration.on_unseen,
                "calibrate_all_experts": options.calibration.calibrate_all_experts,
                "dtype": dtype_choice(options.compute.dtype),
                "dataset": "none" if dataset is None else "some",
                **options.data.sampling(),
            }
        )
        return read, seen

    def solve_measured(
        self, model: PreTrainedModel, recipe: Recipe, measurements: Measurements
    ) -> ModelSink:
        """Solve from measurements; the model stays as it is."""
        driver = driver_for(
            model,
            model_fingerprint(model),
            recipe,
            measurements,
            self.options.calibration.on_unseen,
            progress=self.progress,
        )
        sink = ModelSink(driver)
        with torch.no_grad():
            sink.take(Part(tuple(driver.solution.plan.names)))
        return sink

    def measure_and_solve(
        self, model: PreTrainedModel, recipe: Recipe, dataset: Any, tokenizer: Any
    ) -> ModelSink:
        """Plan, let data run as far as the plan needs it, and solve; the model stays as it is."""
        options = self.options.calibration
        device, dtype = self.device_and_dtype(model)
        with self.ranks.step("planning"), self.progress.waiting("reading the data"):
            plan = plan_for(model, recipe, calibrate_all_experts=options.calibrate_all_experts)
            batches = self._batches(model, plan, dataset, tokenizer)
            chosen: Pipeline = "datafree"
            if batches is not None:
                chosen = self.choose_pipeline(plan, model, device, dtype)
        if batches is not None and plan.uses_folds:
            self.check_samples(batches)
        if batches is not None and plan.finishing:
            check_whole_model(model, plan.modules, batches, device, dtype, self.ranks)
        chosen = self.agreed_pipeline(chosen)
        transforms = self._transform(model, plan, batches, device, dtype)
        plan = replace(plan, transforms={})
        solution = SolvedModel(
            plan, Coverage(options.on_unseen), transforms=transforms, pipeline=chosen
        )
        with Calibration(
            model,
            plan,
            share_inputs=options.share_inputs,
            dtype=dtype,
            num_folds=options.folds if plan.uses_folds else 1,
            fold_of_batch=() if batches is None else batches.parts,
        ) as calibration:
            driver = StepDriver(
                model,
                calibration.measurements,
                solution,
                self.ranks,
                self.progress,
            )
            sink = ModelSink(driver)
            fails = options.on_unseen == "error" and self.ranks.rank == 0
            early = EarlyLook(calibration) if fails else None
            run = Run(calibration, self.ranks, self.progress, device, dtype, early)
            for _ in run_parts(PIPELINES[chosen](run, batches), FoldsSink(calibration), sink):
                pass
            if batches is not None and plan.finishing:
                sink.finish(batches, device, dtype)
        amount = (0, 0) if batches is None else (batches.num_samples, batches.num_tokens)
        samples, tokens = zip(*self.ranks.share(amount), strict=True)
        solution.samples, solution.tokens = sum(samples), sum(tokens)
        solution.forward_dtype = None if chosen == "datafree" else dtype
        return sink

    def _transform(
        self,
        model: PreTrainedModel,
        plan: Plan,
        batches: Batches | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> dict[str, Mapping[str, Any]]:
        """Change the model as the plan wants it before all else, and return what was chosen."""
        solution = SolvedModel(plan, Coverage())
        for transforms in _passes(plan):
            some = replace(plan, transforms=transforms)
            measuring = Plan(
                measured=some.measured_before,
                changed=tuple(name for each in transforms.values() for name in each.changed),
            )
            chosen: Pipeline = "datafree"
            if measuring.measured:
                assert batches is not None
                chosen = self.agreed_pipeline(self.choose_pipeline(measuring, model, device, dtype))
            share = self.options.calibration.share_inputs
            with Calibration(model, measuring, share_inputs=share, dtype=dtype) as calibration:
                solution.plan = some
                driver = StepDriver(
                    model, calibration.measurements, solution, self.ranks, self.progress
                )
                sink = TransformSink(driver)
                run = Run(calibration, self.ranks, self.progress, device, dtype, what="equalizing")
                for _ in run_parts(PIPELINES[chosen](run, batches), sink):
                    pass
            apply_changes(model, (), Changes(tensors=sink.tensors), tied_names(model))
        return solution.transforms

    def _batches(
        self, model: PreTrainedModel, plan: Plan, dataset: Any, tokenizer: Any
    ) -> Batches | None:
        """Load the share of this process; None if the plan needs no data."""
        wanting = tensors_without_data(plan, model)
        if not wanting:
            return None
        if dataset is None or self.options.calibration.pipeline == "datafree":
            problem, remedy = "there is no " + Option("dataset"), "Pass " + Option("dataset", ANY)
            if dataset is not None:
                problem = Option("pipeline", "datafree") + " uses none"
                remedy = Text("Choose another pipeline")
            raise data_missing(wanting, problem, remedy)
        for_ranges = plan.has_static_activations
        # Sums do not depend on how samples are batched. Observers with moving averages do, and what
        # runs on the float model is to be that of a file of measurements, to the bit.
        is_free = plan.propagation != "float" and not for_ranges
        by_length = is_free and self.options.data.batch_size is None
        cut: dict[str, Any] = {"batch_tokens": _BATCH_TOKENS} if by_length else {}
        if plan.uses_folds:
            cut |= self.in_folds()
        return self.batches_for(model, dataset, tokenizer, for_ranges=for_ranges, **cut)

    def write(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        recipe: Recipe,
        sink: ModelSink,
    ) -> None:
        """Freeze the model, and write the checkpoint if one is wanted."""
        output = self.options.output
        with self.ranks.step("freezing the model"):
            sink.freeze(model)
        with self.ranks.step("writing the checkpoint"):
            if output.output_dir is not None and self.ranks.rank == 0:
                # Without one of its own, the files beside the model are the tokenizer's.
                is_own = self.options.data.tokenizer is None and source_folder(model) is not None
                write_checkpoint(
                    model,
                    output.output_dir,
                    recipe=recipe.to_yaml(),
                    tokenizer=None if is_own else tokenizer,
                    notes=sink.driver.solution.provenance(),
                    overwrite=output.overwrite,
                    max_shard_size=output.max_shard_size,
                    progress=self.progress,
                )
