"""From a model, a recipe and data to a quantized checkpoint, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calipers.calibration.context import Calibration
from calipers.calibration.coverage import Coverage
from calipers.calibration.data import Batches
from calipers.calibration.early import EarlyLook
from calipers.calibration.lifecycle import freeze
from calipers.calibration.pipelines import Run
from calipers.calibration.snapshot import unchanged_on_error
from calipers.checkpoint.output import check_output
from calipers.checkpoint.shards import parse_size
from calipers.checkpoint.source import source_folder
from calipers.checkpoint.writer import write_checkpoint
from calipers.engine.driver import Solution, StepDriver, report_coverage, report_notes
from calipers.engine.job import (
    PIPELINES,
    Job,
    check_on_unseen,
    check_options,
    tensors_without_data,
)
from calipers.errors import ANY, Call, ConfigurationError, Option, Text, counted
from calipers.judging.costs import ModuleCosts, report_costs
from calipers.notebook import NotebookView
from calipers.options import (
    CalibrationOptions,
    ComputeOptions,
    DataOptions,
    OneshotKeywords,
    OneshotOptions,
    OutputOptions,
    RecipeOptions,
)
from calipers.planning.plan import Plan
from calipers.recipes import Recipe, load_changed_recipe
from calipers.recipes.compiling import plan_for
from calipers.runtime.joining import joined_ranks
from calipers.runtime.precision import dtype_choice
from calipers.runtime.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack


_BATCH_TOKENS = 2048  # of batches of like samples: beyond, larger ones are no faster


@dataclass(frozen=True)
class OneshotResult(NotebookView):
    """What ``oneshot`` did.

    :param model: the frozen model: it computes with fake quantization
    :param plan: what was quantized, how, and by which observers
    :param coverage: how many tokens each module saw
    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param recipe: the recipe, as it was read
    :param output_dir: where the checkpoint is, if one was asked for
    :param costs: module → what its static activations and its output lose, where data ran
    :param notes: module → what was done otherwise than the recipe says, and why
    """

    model: PreTrainedModel
    plan: Plan
    coverage: Coverage
    errors: Mapping[str, float]
    recipe: Recipe
    output_dir: Path | None = None
    costs: Mapping[str, ModuleCosts] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        """That of the model."""
        return self.model.dtype

    @property
    def source(self) -> Path | None:
        """The folder that the model came from, if it is at hand."""
        return source_folder(self.model)

    def __repr__(self) -> str:
        return f"OneshotResult({', '.join(f'{key}: {fact}' for key, fact in self.facts().items())})"

    def facts(self) -> dict[str, object]:
        """Return what matters most, by its name."""
        facts = {"model": type(self.model).__name__, "plan": self.plan, "coverage": self.coverage}
        if self.errors:
            facts["largest error of a weight"] = f"{max(self.errors.values()):.2%}"
        return facts if self.output_dir is None else {**facts, "written to": self.output_dir}


def oneshot(
    model: PreTrainedModel | str | Path,
    recipe: Any,
    dataset: Any = None,
    *,
    data: DataOptions | None = None,
    compute: ComputeOptions | None = None,
    calibration: CalibrationOptions | None = None,
    changes: RecipeOptions | None = None,
    output: OutputOptions | None = None,
    **keywords: Unpack[OneshotKeywords],
) -> OneshotResult:
    """Quantize a model as a recipe says, and write a checkpoint that transformers and vLLM load.

    A model given as an object is changed: afterwards it is frozen. If anything fails, it is left as
    it was, and no output is left. Under ``torchrun`` every process calls this with the same
    arguments; each takes its share of the data and of the work, and the first one writes. The
    process group is made, and ended, here, unless there is one already.

    :param model: a transformers model, or the path or name to load one from
    :param recipe: a file, a YAML string, a preset such as ``"W4A16"``, or modifiers
    :param dataset: a file (text, JSONL, Parquet), a data set by name (``ORG/NAME[@CONFIG][:SPLIT]``
        on the hub, or a folder), texts, token ids, a ``datasets`` object or a DataLoader; needed if
        the plan needs data
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
    _check(options)
    with joined_ranks(options.calibration.timeout) as ranks:
        wanted = options.compute.progress if ranks.rank == 0 else False
        job = _OneshotJob(options, ranks, Progress.of(wanted))
        parsed = job.read(model, recipe, dataset)
        into = options.output.output_dir
        with job.loaded(model, apart_from=into) as (loaded, tokenizer), unchanged_on_error(loaded):
            solution, notes = job.measure_and_solve(loaded, parsed, dataset, tokenizer)
            written = job.write(loaded, tokenizer, parsed, solution, notes)
    return OneshotResult(
        loaded,
        solution.plan,
        solution.coverage,
        solution.errors,
        parsed,
        written,
        costs=solution.costs,
        notes=solution.changes.notes,
    )


def _check(options: OneshotOptions) -> None:
    """Refuse options that cannot be meant, before anything is read."""
    check_on_unseen(options.calibration.on_unseen)
    parse_size(options.output.max_shard_size)
    check_options(options)


@dataclass(frozen=True)
class _OneshotJob(Job):
    """The parts of a call, in the order in which all processes take them."""

    options: OneshotOptions

    def read(self, model: Any, recipe: Any, dataset: Any) -> Recipe:
        """Read the arguments, which must be the same in all processes."""
        options, changes, output = self.options, self.options.changes, self.options.output
        with self.ranks.step("reading the arguments"):
            if output.output_dir is not None:
                start = model if isinstance(model, (str, Path)) else source_folder(model)
                inputs = {"model": start, "data": dataset, "recipe": recipe}
                inputs["tokenizer"] = options.data.tokenizer
                check_output(output.output_dir, output.overwrite, inputs)
            parsed = load_changed_recipe(recipe, **changes.values())
        self.ranks.agree(
            {
                "method": changes.method,
                "recipe": parsed.to_yaml(),
                "allow_code": changes.allow_code,
                "pipeline": options.calibration.pipeline,
                "on_unseen": options.calibration.on_unseen,
                "calibrate_all_experts": options.calibration.calibrate_all_experts,
                "dtype": dtype_choice(options.compute.dtype),
                "dataset": "none" if dataset is None else "some",
                **options.data.sampling(),
            }
        )
        return parsed

    def measure_and_solve(
        self, model: PreTrainedModel, recipe: Recipe, dataset: Any, tokenizer: Any
    ) -> tuple[Solution, dict[str, Any]]:
        """Plan, let data run as far as the plan needs it, and solve; the model stays as it is."""
        device, dtype = self.device_and_dtype(model)
        with self.ranks.step("planning"), self.progress.waiting("reading the data"):
            plan = plan_for(
                model,
                recipe,
                calibrate_all_experts=self.options.calibration.calibrate_all_experts,
            )
            batches = self._batches(model, plan, dataset, tokenizer)
            chosen = "datafree"
            if batches is not None:
                chosen = self.choose_pipeline(plan, model, device, dtype)
        chosen = self.agreed_pipeline(chosen)
        solution = self._run(model, plan, chosen, batches, device, dtype)
        if self.ranks.rank == 0:
            report_coverage(solution.coverage)
            report_costs(solution.costs)
            report_notes(solution.changes.notes)
        return solution, self._notes(solution, chosen, dtype, batches)

    def _notes(
        self, solution: Solution, pipeline: str, dtype: torch.dtype, batches: Batches | None
    ) -> dict[str, Any]:
        """Return what the checkpoint says about how it was made."""
        amounts = self.ranks.share(_amount(batches))
        samples, tokens = (sum(each) for each in zip(*amounts, strict=True))
        ran = None if pipeline == "datafree" else dtype
        return solution.as_notes(pipeline, samples, tokens, ran)

    def _batches(
        self, model: PreTrainedModel, plan: Plan, dataset: Any, tokenizer: Any
    ) -> Batches | None:
        """Load the share of this process; None if the plan needs no data."""
        wanting = tensors_without_data(plan, model)
        if not wanting:
            return None
        if dataset is None or self.options.calibration.pipeline == "datafree":
            raise _no_data(wanting, has_dataset=dataset is not None)
        for_ranges = plan.has_static_activations
        # Sums do not depend on how samples are batched. Observers with moving averages do, and what
        # runs on the float model is to be that of a file of measurements, to the bit.
        is_free = plan.propagation != "float" and not for_ranges
        by_length = is_free and self.options.data.batch_size is None
        cut = {"batch_tokens": _BATCH_TOKENS} if by_length else {}
        return self.batches_for(model, dataset, tokenizer, for_ranges=for_ranges, **cut)

    def _run(
        self,
        model: PreTrainedModel,
        plan: Plan,
        pipeline: str,
        batches: Batches | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Solution:
        """Let data run, and solve what has seen it."""
        options, ranks, progress = self.options.calibration, self.ranks, self.progress
        solution = Solution(plan, Coverage(options.on_unseen))
        with Calibration(
            model, plan, share_inputs=options.share_inputs, dtype=dtype
        ) as calibration:
            driver = StepDriver(model, calibration.measurements, solution, ranks, progress)
            fails = options.on_unseen == "error" and ranks.rank == 0
            early = EarlyLook(calibration) if fails else None
            run = Run(calibration, driver.solve, ranks, progress, device, dtype, early)
            PIPELINES[pipeline](run, batches)
        return solution

    def write(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        recipe: Recipe,
        solution: Solution,
        notes: Mapping[str, Any],
    ) -> Path | None:
        """Freeze the model, and write the checkpoint if one is wanted."""
        output = self.options.output
        with self.ranks.step("freezing the model"):
            freeze(model, solution.plan, solution.changes)
        with self.ranks.step("writing the checkpoint"):
            if output.output_dir is not None and self.ranks.rank == 0:
                write_checkpoint(
                    model,
                    output.output_dir,
                    recipe=recipe.to_yaml(),
                    tokenizer=None if self._is_from_model(model) else tokenizer,
                    notes=notes,
                    overwrite=output.overwrite,
                    max_shard_size=output.max_shard_size,
                    progress=self.progress,
                )
        return None if output.output_dir is None else Path(output.output_dir)

    def _is_from_model(self, model: PreTrainedModel) -> bool:
        """Whether the tokenizer is the one whose files are beside those of the model."""
        return self.options.data.tokenizer is None and source_folder(model) is not None


def _no_data(tensors: Sequence[str], *, has_dataset: bool) -> ConfigurationError:
    """Refuse a plan that needs data where none runs."""
    problem, remedy = "there is no " + Option("dataset"), "Pass " + Option("dataset", ANY)
    if has_dataset:
        problem = Option("pipeline", "datafree") + " uses none"
        remedy = Text("Choose another pipeline")
    return ConfigurationError(
        f"The recipe needs data for {counted(len(tensors), 'tensor')} (the first is "
        f"{tensors[0]}), and " + problem,
        hint=remedy
        + ", or choose dynamic activations and observers that look at weights alone. "
        + Call("plan.table")
        + " shows which tensors need data",
    )


def _amount(batches: Batches | None) -> tuple[int, int]:
    """Return how many samples and tokens this process has."""
    return (0, 0) if batches is None else (batches.num_samples, batches.num_tokens)
