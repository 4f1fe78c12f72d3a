"""From a model, a recipe and data to a quantized checkpoint, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from calipers.calibration.concluding import Conclusions, Findings, report_coverage
from calipers.calibration.costs import ModuleCosts, report_costs
from calipers.calibration.coverage import Coverage, UnseenPolicy
from calipers.calibration.data import Batches, calibration_batches, limits_of
from calipers.calibration.distributed import DEFAULT_TIMEOUT, Crew, fingerprint
from calipers.calibration.early import EarlyLook
from calipers.calibration.experts import fused_experts, unfuse_experts
from calipers.calibration.freezing import freeze
from calipers.calibration.pipelines import (
    Run,
    free_memory,
    run_basic,
    run_datafree,
    usable_device,
)
from calipers.calibration.plan import Plan
from calipers.calibration.precision import DtypeChoice, bytes_of_copies, dtype_choice, forward_dtype
from calipers.calibration.progress import Progress
from calipers.calibration.sequential import run_sequential
from calipers.calibration.snapshot import unchanged_on_error
from calipers.calibration.watching import WatchedModel
from calipers.checkpoint.output import check_output
from calipers.checkpoint.reader import load_model, load_tokenizer
from calipers.checkpoint.shards import parse_size
from calipers.checkpoint.source import check_apart, source_folder
from calipers.checkpoint.writer import write_checkpoint
from calipers.errors import NoDataError, UnknownChoiceError
from calipers.html import facts_table, html_table
from calipers.recipes import Recipe, load_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PipelineChoice = Literal["auto", "datafree", "basic", "sequential"]


@dataclass(frozen=True)
class OneshotResult:
    """What ``oneshot`` did.

    :param model: the frozen model: it computes with fake quantization
    :param plan: what was quantized, how, and by which observers
    :param coverage: how many tokens each module saw
    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param recipe: the recipe, as it was read
    :param output_dir: where the checkpoint is, if one was asked for
    :param costs: module → what its static activations and its output lose, where data ran
    """

    model: PreTrainedModel
    plan: Plan
    coverage: Coverage
    errors: Mapping[str, float]
    recipe: Recipe
    output_dir: Path | None = None
    costs: Mapping[str, ModuleCosts] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"OneshotResult({', '.join(f'{key}: {fact}' for key, fact in self._facts().items())})"
        )

    def _repr_html_(self) -> str:
        if self.costs:
            costs = sorted(self.costs.items(), key=lambda pair: -pair[1].worst)
            rows = [{"module": name, **cost.shares()} for name, cost in costs]
            title = "Modules whose output suffers most"
        else:
            errors = sorted(self.errors.items(), key=lambda pair: -pair[1])
            rows = [{"weight": name, "error": f"{error:.2%}"} for name, error in errors]
            title = "Weights that lost most"
        return facts_table(self._facts()) + html_table(rows, title, most=10)

    def _facts(self) -> dict[str, object]:
        facts = {"model": type(self.model).__name__, "plan": self.plan, "coverage": self.coverage}
        if self.errors:
            facts["largest error of a weight"] = f"{max(self.errors.values()):.2%}"
        return facts if self.output_dir is None else {**facts, "written to": self.output_dir}


def oneshot(
    model: PreTrainedModel | str | Path,
    recipe: Any,
    dataset: Any = None,
    *,
    output_dir: str | Path | None = None,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    num_calibration_samples: int = 512,
    max_seq_length: int | None = None,
    batch_size: int = 1,
    packing: bool | None = None,
    shuffle: bool = True,
    seed: int = 0,
    text_column: str | None = None,
    pipeline: PipelineChoice = "auto",
    device: torch.device | str | None = None,
    dtype: DtypeChoice | torch.dtype = "auto",
    group_size: int | None = None,
    weight_observer: Any = None,
    activation_observer: Any = None,
    on_unseen: UnseenPolicy = "error",
    calibrate_all_experts: bool = False,
    share_inputs: bool = True,
    overwrite: bool = False,
    max_shard_size: str = "5GB",
    trust_remote_code: bool = False,
    allow_code: bool = False,
    timeout: timedelta = DEFAULT_TIMEOUT,
    progress: bool | Progress | None = None,
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
    :param output_dir: where the checkpoint goes; None writes nothing
    :param tokenizer: the tokenizer, or where it is; by default the one that belongs to the model
    :param num_calibration_samples: how many samples to take, over all processes
    :param max_seq_length: the longest sample, in tokens; None: 2048, or what the model can take
        where that is less
    :param batch_size: samples per batch
    :param packing: whether samples are joined and cut to equal length, so that nothing is padded
    :param shuffle: whether to take samples from everywhere, or from the beginning
    :param seed: of the shuffling
    :param text_column: the column of the text, where records have several
    :param pipeline: ``datafree``, ``basic`` (the whole model), ``sequential`` (layer by layer), or
        ``auto``
    :param device: where the model computes; by default where it is
    :param dtype: the dtype of the forward pass: ``float32``, ``bfloat16``, ``float16``, or
        ``auto``: that of the model, or float32 on a CPU that has no instructions for it. What is
        stored has the model's own in any case
    :param group_size: instead of those that the recipe gives the groups of weights
    :param weight_observer: who watches weights, instead of those that the recipe names: a name, or
        a mapping such as ``{"name": "optimal", "importance": "hessian"}``
    :param activation_observer: the same for static activations
    :param on_unseen: what becomes of modules that no token reached: ``error``, ``weights_only`` or
        ``peers``
    :param calibrate_all_experts: whether experts see all tokens, not only those routed to them
    :param share_inputs: whether a tensor that several modules read is measured once for all
    :param overwrite: whether an existing checkpoint is replaced
    :param max_shard_size: the largest size of a file of tensors
    :param trust_remote_code: whether code that comes with the model may run
    :param allow_code: whether observers in files, ``path/to/file.py:Class``, which the recipe
        names, may run
    :param timeout: how long a process that gives no sign of life is waited for by the others
    :param progress: whether to show progress bars; None: where a person looks at standard error,
        and elsewhere a line about every 30 seconds
    """
    _check_choice("pipeline", pipeline, get_args(PipelineChoice))
    _check_choice("on_unseen", on_unseen, get_args(UnseenPolicy))
    parse_size(max_shard_size)
    computes_in = dtype_choice(dtype)
    place = usable_device(device)
    sampling = {
        "num_samples": num_calibration_samples,
        "max_seq_length": max_seq_length,
        "batch_size": batch_size,
        "packing": packing,
        "shuffle": shuffle,
        "seed": seed,
        "text_column": text_column,
    }
    with Crew(timeout) as crew:
        bars = Progress.of(progress if crew.rank == 0 else False)
        with crew.step("reading the arguments"):
            if output_dir is not None:
                start = model if isinstance(model, (str, Path)) else source_folder(model)
                inputs = {"model": start, "data": dataset, "recipe": recipe, "tokenizer": tokenizer}
                check_output(output_dir, overwrite, inputs)
            changed = load_recipe(recipe, allow_code=allow_code).changed(
                group_size=group_size,
                weight_observer=weight_observer,
                activation_observer=activation_observer,
            )
            parsed = load_recipe(changed, allow_code=allow_code)
        crew.agree(
            {
                "recipe": parsed.to_yaml(),
                "allow_code": allow_code,
                "pipeline": pipeline,
                "on_unseen": on_unseen,
                "calibrate_all_experts": calibrate_all_experts,
                "dtype": computes_in,
                "dataset": "none" if dataset is None else "some",
                **sampling,
            }
        )
        with crew.step("loading the model"), bars.waiting("loading the model"):
            lazily = pipeline == "sequential" and crew.world_size == 1
            loaded = load_model(
                model,
                trust_remote_code=trust_remote_code,
                on_disk_for=(place or torch.device("cpu")) if lazily else None,
            )
            if output_dir is not None:
                check_apart(output_dir, loaded)
            words = load_tokenizer(tokenizer, loaded, trust_remote_code=trust_remote_code)
        if crew.world_size > 1:
            crew.agree({"model": fingerprint(loaded)})
        place = place or loaded.device
        forward = forward_dtype(computes_in, loaded, place)
        if str(torch.float32) in crew.share(str(forward)):
            forward = torch.float32  # where one CPU is slow, all do the same
        with unchanged_on_error(loaded):
            with crew.step("planning"), bars.waiting("reading the data"):
                plan = plan_for(loaded, parsed, calibrate_all_experts=calibrate_all_experts)
                wanting = _wanting(plan, loaded)
                if wanting and (dataset is None or pipeline == "datafree"):
                    raise NoDataError(wanting, has_dataset=dataset is not None)
                sampling["use"] = "ranges" if plan.has_static_activations else "importance"
                batches = _load_batches(dataset, words, loaded, crew, sampling) if wanting else None
                chosen = "datafree"
                if wanting:
                    chosen = _choose_pipeline(pipeline, loaded, place, forward)
            if "sequential" in crew.share(chosen):
                chosen = "sequential"  # where memory is short on one device, all go layer by layer
            findings = Findings(plan, Coverage(on_unseen))
            with WatchedModel(loaded, plan, share_inputs=share_inputs, dtype=forward) as watched:
                conclude = Conclusions(watched, findings, crew, bars).conclude
                fails = on_unseen == "error" and crew.rank == 0
                early = EarlyLook(watched) if fails else None
                run = Run(watched, conclude, crew, bars, place, forward, early)
                _PIPELINES[chosen](run, batches)
            if crew.rank == 0:
                report_coverage(findings.coverage)
                report_costs(findings.costs)
            notes = _notes(findings, chosen, forward, crew.share(_amount(batches)))
            with crew.step("freezing the model"):
                freeze(loaded, findings.plan, findings.qparams)
                for name, sums in findings.sums.items():
                    vars(loaded.get_submodule(name)).update(sums)
            with crew.step("writing the checkpoint"), bars.waiting("writing the checkpoint"):
                if output_dir is not None and crew.rank == 0:
                    write_checkpoint(
                        loaded,
                        output_dir,
                        recipe=parsed.to_yaml(),
                        tokenizer=words,
                        notes=notes,
                        overwrite=overwrite,
                        max_shard_size=max_shard_size,
                    )
    written = None if output_dir is None else Path(output_dir)
    return OneshotResult(
        loaded,
        findings.plan,
        findings.coverage,
        findings.errors,
        parsed,
        written,
        costs=findings.costs,
    )


def _load_batches(
    dataset: Any, tokenizer: Any, model: PreTrainedModel, crew: Crew, sampling: Mapping[str, Any]
) -> Batches:
    """Load the share of this process; ids that the model does not know are refused."""
    limits = limits_of(model, sampling["max_seq_length"])
    share = {"rank": crew.rank, "world_size": crew.world_size}
    return calibration_batches(dataset, tokenizer, **{**sampling, **share, **limits})


def plan_for(
    model: torch.nn.Module, recipe: Recipe, *, calibrate_all_experts: bool = False
) -> Plan:
    """Compile a recipe for a model, whose fused experts become modules where it quantizes them."""
    fused = {
        name: module
        for name, module in fused_experts(model).items()
        if recipe.aims_at_experts(name)
    }
    unfuse_experts(model, fused)
    plan = recipe.compile(model)
    for name, module in fused.items():
        if any(other.startswith(f"{name}.") for other in plan.names):
            vars(model.get_submodule(name))["calibrate_all_experts"] = calibrate_all_experts
        else:
            model.set_submodule(name, module)
    return plan


def _check_choice(option: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise UnknownChoiceError(option, given, known)


def _choose_pipeline(
    choice: PipelineChoice, model: PreTrainedModel, device: torch.device, dtype: torch.dtype
) -> str:
    """Return how data runs through a model: as a whole, if what is copied for it has room."""
    if choice != "auto":
        return choice
    size = bytes_of_copies(model, dtype)
    if model.device != device:
        size = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    return "basic" if not size or size < 0.8 * free_memory(device) else "sequential"


def _wanting(plan: Plan, model: torch.nn.Module) -> list[str]:
    """Name the tensors that need data; what was summed up before is data, too."""
    tensors = [
        f"{tensor.module}.{tensor.base_name}"
        for tensor in plan
        if tensor.needs_data and not tensor.has_sums_on(model.get_submodule(tensor.module))
    ]
    return [*tensors, *(f"{name}.input" for name in plan.gathered)]


_PIPELINES: dict[str, Callable[[Run, Any], None]] = {
    "datafree": lambda run, _: run_datafree(run),
    "basic": run_basic,
    "sequential": run_sequential,
}


def _amount(batches: Batches | None) -> tuple[int, int]:
    """Return how many samples and tokens this process has."""
    return (0, 0) if batches is None else (batches.num_samples, batches.num_tokens)


def _notes(
    findings: Findings,
    pipeline: str,
    dtype: torch.dtype,
    amounts: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Return what the checkpoint says about how it was made."""
    return {
        "pipeline": pipeline,
        "forward_dtype": None if pipeline == "datafree" else str(dtype).removeprefix("torch."),
        "samples": sum(samples for samples, _ in amounts),
        "tokens": sum(tokens for _, tokens in amounts),
        "coverage": findings.coverage.as_dict(),
        "weight_errors": findings.errors,
        "costs": {name: asdict(each) for name, each in findings.costs.items()},
    }
