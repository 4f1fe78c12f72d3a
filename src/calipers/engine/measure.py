"""From a model and data to measurements, of which it can be quantized in any way afterwards."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calipers.calibration.context import Calibration, left_as_found
from calipers.calibration.data import Batch, Batches
from calipers.calibration.pipelines import Run, call_model, moved
from calipers.calibration.sensitivity import add_sensitivities
from calipers.checkpoint.auxiliary_files import source_folder
from calipers.checkpoint.reader import load_skeleton
from calipers.checkpoint.stored_weights import model_fingerprint
from calipers.engine.dry_run import statistics_bytes
from calipers.engine.job import Job, check_options
from calipers.engine.loop import PIPELINES, MeasurementsSink, run_parts
from calipers.errors import (
    ANY,
    CalipersWarning,
    ConfigurationError,
    FusedExpertsError,
    Mistakes,
    Option,
    counted,
    no_meaning,
    not_allowed,
    shortened,
)
from calipers.files.writing import output_file as place_of
from calipers.kernels.resources import FreedMemory
from calipers.measurements import Measurements, MeasurementsInfo
from calipers.measurements.info import sample_digests
from calipers.measurements.partial import PartialFile, remove_superfluous
from calipers.measurements.store import check_measurements_file
from calipers.measurements.sufficiency import check_until_stable, stopping_points
from calipers.measurements.tensors import (
    Tensors,
    merged,
    parted,
    unified,
    with_folds,
    without_last_hessians,
)
from calipers.options import (
    CalibrationOptions,
    ComputeOptions,
    DataOptions,
    MeasureKeywords,
    MeasureOptions,
    Pipeline,
)
from calipers.planning.measuring import check_collected, collecting_plan
from calipers.planning.plan import Plan
from calipers.planning.specs import SENSITIVITY
from calipers.runtime.distributed import joined_ranks
from calipers.runtime.precision import dtype_choice
from calipers.runtime.progress import Progress
from calipers.statistics.sums import Sensitivity
from calipers.topology.experts import fused_experts, unfuse_experts

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Unpack

SAVE_EVERY = 60.0
"""Seconds between two files of what was measured so far."""
_FREED_BY_BATCH = 1 << 28
"""Bytes, more or less: products of inputs, gradients and logits, between sums that stay."""


def measure(
    model: PreTrainedModel | str | Path,
    dataset: Any,
    *,
    collect: str | Collection[str] = (),
    output_file: str | Path | None = None,
    overwrite: bool = False,
    save_every: float = SAVE_EVERY,
    until_stable: bool | float = False,
    data: DataOptions | None = None,
    compute: ComputeOptions | None = None,
    calibration: CalibrationOptions | None = None,
    **keywords: Unpack[MeasureKeywords],
) -> Measurements:
    """Run data through a model, and return what was seen of the inputs of its Linear modules.

    The model is left as it was. Under ``torchrun`` every process calls this with the same
    arguments, takes its share of the data, and returns the measurements of all.

    :param model: a transformers model, or the path or name to load one from
    :param dataset: whatever :func:`calipers.oneshot` takes
    :param collect: what is collected besides: ``hessian`` (Σ x xᵀ of inputs), ``outputs`` (value
        counts and extrema), ``attention`` (those of queries, keys and values, also of each head),
        ``sensitivity`` (how much the loss depends on each column of a weight: every batch also runs
        backwards, which takes three times as long), and the names of statistics that packages bring
        (of inputs)
    :param output_file: where the measurements are written; None writes nothing. What was measured
        is written now and then to a file beside it, ``….partial``: if the process dies, the same
        call goes on from there (one process, pipeline ``basic``)
    :param overwrite: whether a file of measurements that is there is replaced
    :param save_every: how many seconds pass until what was measured is written again
    :param until_stable: whether to stop as soon as what was measured suffices, by
        :meth:`Measurements.sufficiency`; a number is the tolerance. ``num_samples`` are then the
        most that are taken. It is looked at after 16 samples, 24, 32, 48, 64 and so on
    :param data: which samples are taken: :class:`calipers.options.DataOptions`
    :param compute: where the model computes, and in which dtype
    :param calibration: how data runs through it; ``on_unseen`` and the pipeline ``datafree`` have
        no meaning here
    :param keywords: the options of all groups, one by one
    """
    options = MeasureOptions.merged(keywords, data=data, compute=compute, calibration=calibration)
    collected, tolerance = check_arguments(options, collect, save_every, until_stable)
    with joined_ranks(options.calibration.timeout) as ranks:
        wanted = options.compute.progress if ranks.rank == 0 else False
        job = _MeasureJob(options, ranks, Progress.of(wanted), tolerance)
        job.read(model, dataset, collected, output_file, overwrite)
        with ExitStack() as stack:
            loaded, tokenizer = stack.enter_context(job.loaded(model))
            partial = None
            if output_file is not None and ranks.rank == 0:
                place = stack.enter_context(place_of(Path(output_file).resolve()))
                partial = PartialFile(place, save_every)
                check_measurements_file(output_file, overwrite)  # another writer was waited for
            with left_as_found(loaded):
                result = job.measure(loaded, dataset, tokenizer, collected, partial)
            with ranks.step("writing the measurements"):
                if partial is not None:
                    partial.finish(result, overwrite=overwrite)
    if ranks.rank == 0:
        _warn_of_unseen(result)
    return result


def check_arguments(
    options: MeasureOptions,
    collect: str | Collection[str],
    save_every: Any,
    until_stable: object = False,
) -> tuple[tuple[str, ...], float | None]:
    """Check all that a call is given but its files; return what is collected, and the tolerance."""
    mistakes, calibration = Mistakes(), options.calibration
    mistakes.check(check_options, options)
    if calibration.gives("on_unseen"):
        mistakes.add(no_meaning("on_unseen", calibration.on_unseen, "measurements"))
    if calibration.pipeline == "datafree":
        mistakes.add(no_meaning("pipeline", "datafree", "measurements"))
    is_number = isinstance(save_every, (int, float)) and not isinstance(save_every, bool)
    if not (is_number and save_every >= 0):
        mistakes.add(not_allowed("save_every", save_every, "a number of seconds, 0 or more"))
    collected = mistakes.check(check_collected, collect)
    tolerance = mistakes.check(check_until_stable, until_stable)
    if tolerance is not None and calibration.folds == 1:
        mistakes.add(no_meaning("until_stable", until_stable, "one fold: two are compared"))
    mistakes.tell()
    return collected, tolerance


def check_output(file: str | Path, overwrite: bool, inputs: Mapping[str, object]) -> None:
    """Refuse a place that measurements cannot be written to; a superfluous partial file goes."""
    remove_superfluous(Path(os.path.realpath(file)))
    check_measurements_file(file, overwrite, inputs)


@dataclass(frozen=True)
class _MeasureJob(Job):
    """The parts of a call, in the order in which all processes take them."""

    tolerance: float | None = None

    def read(
        self,
        model: Any,
        dataset: Any,
        collected: tuple[str, ...],
        output_file: str | Path | None,
        overwrite: bool,
    ) -> None:
        """Check the arguments, which must be the same in all processes."""
        options = self.options
        with self.ranks.step("reading the arguments"):
            if dataset is None:
                problem = "Measuring needs data, and there is no " + Option("dataset")
                raise ConfigurationError(problem, hint="Pass " + Option("dataset", ANY))
            if output_file is not None and self.ranks.rank == 0:
                start = model if isinstance(model, (str, Path)) else source_folder(model)
                inputs = {"model": start, "data": dataset, "tokenizer": options.data.tokenizer}
                check_output(output_file, overwrite, inputs)
        dtype, pipeline = dtype_choice(options.compute.dtype), options.calibration.pipeline
        self.ranks.agree({**self._common(collected), "pipeline": pipeline, "dtype": dtype})

    def _common(self, collected: tuple[str, ...]) -> dict[str, Any]:
        """Return what processes, and a run and the one that goes on with it, have in common."""
        return {
            "collect": list(collected),
            "until_stable": self.tolerance,
            "calibrate_all_experts": self.options.calibration.calibrate_all_experts,
            **self.options.data.sampling(),
        }

    def measure(
        self,
        model: PreTrainedModel,
        dataset: Any,
        tokenizer: Any,
        collected: tuple[str, ...],
        partial: PartialFile | None,
    ) -> Measurements:
        """Let the data run, and return what was seen of it in all processes."""
        options = self.options
        device, dtype = self.device_and_dtype(model)
        with self.ranks.step("planning"), self.progress.waiting("reading the data"):
            about = MeasurementsInfo(type(model).__name__, model_fingerprint(model))
            every = options.calibration.calibrate_all_experts
            plan = _plan(model, collected, calibrate_all_experts=every)
            stops = () if self.tolerance is None else stopping_points(options.data.num_samples)
            cut = {**self.in_folds(), "stops": stops}
            batches = self.batches_for(model, dataset, tokenizer, for_ranges=True, **cut)
            chosen = self.choose_pipeline(plan, model, device, dtype)
        self.check_samples(batches)
        chosen = self.agreed_pipeline(chosen)
        if "sensitivity" in collected and chosen != "basic":
            problem = f"'sensitivity' needs the whole model at once, and its data runs '{chosen}'"
            remedy = "Pass " + Option("pipeline", "basic") + ", or leave it out of "
            raise ConfigurationError(problem, hint=remedy + Option("collect"))
        run = _DataRun(self, model, plan, chosen, device, dtype, about, batches, partial)
        done = 0
        if partial is not None and chosen == "basic" and self.ranks.world_size == 1:
            order = str(list(_digests(batches)))
            done = partial.begin(
                {
                    "model": about.fingerprint,
                    "dtype": str(dtype).removeprefix("torch."),
                    "folds": options.calibration.folds,
                    **self._common(collected),
                    "data": hashlib.sha256(order.encode()).hexdigest()[:16],
                }
            )
            run.known = partial.earlier() or {}
        last = len(batches.ends) - 1
        for number, end in enumerate(batches.ends):
            if end > done or self.ranks.world_size > 1:
                run.go_through(done, end)
                done = end
            if end < done and number < last:
                continue  # an earlier run has gone on here
            measured = run.measurements(end)
            if number == last:
                return measured
            assert self.tolerance is not None
            with self.progress.waiting("comparing halves of the data"):
                first = self.ranks.rank == 0  # one process decides for all
                suffices = first and measured.sufficiency(self.tolerance).is_sufficient
            if self.ranks.share(suffices)[0]:
                return measured
            del measured  # sums that go on are not kept as they were
        raise AssertionError("the last of the data is the end of it")


@dataclass
class _DataRun:
    """How the data of a process runs through a model, as much of it at a time as is wanted.

    :param known: what was seen so far, in all processes
    """

    job: _MeasureJob
    model: PreTrainedModel
    plan: Plan
    pipeline: Pipeline
    device: torch.device
    dtype: torch.dtype
    about: MeasurementsInfo
    batches: Batches
    partial: PartialFile | None
    known: Tensors = field(default_factory=dict)

    def go_through(self, start: int, end: int) -> None:
        """Let batches run, and know what was seen of them in all processes, too."""
        job, batches = self.job, self.batches
        is_alone = job.ranks.world_size == 1
        before, self.known = self.known, {}
        freed = FreedMemory()
        with Calibration(
            self.model,
            self.plan,
            share_inputs=job.options.calibration.share_inputs,
            dtype=self.dtype,
            num_folds=job.options.calibration.folds,
            fold_of_batch=batches.parts[start:end],
            known=parted(before) if is_alone and before else None,
        ) as calibration:
            if is_alone:
                before = {}  # it is in the sums that go on

            def so_far() -> Tensors:
                return with_folds(calibration.so_far())

            def after_batch(index: int) -> None:
                freed.count(_FREED_BY_BATCH)
                with calibration.paused():
                    _add_sensitivities(self.model, calibration, batches.batches[start + index])
                if self.partial is not None and is_alone:
                    number = start + index + 1
                    self.partial.save(self._info(number), so_far, number)
                freed.count(_FREED_BY_BATCH)

            run = Run(
                calibration,
                job.ranks,
                job.progress,
                self.device,
                self.dtype,
                after_batch=after_batch,
                what="measuring",
            )
            shown = replace(batches, batches=batches.batches[start:end])
            sink = MeasurementsSink(calibration, job.ranks)
            for _ in run_parts(PIPELINES[self.pipeline](run, shown), sink):
                pass
        found = with_folds([fold.tensors() for fold in calibration.folds])
        self.known = merged(before, found) if before else found

    def measurements(self, count: int) -> Measurements:
        """Return what all processes have seen when this one has run so many batches."""
        own = self._info(count)
        everywhere = self.job.ranks.share((list(own.samples), own.tokens))
        samples = sorted(each for samples, _ in everywhere for each in samples)
        info = replace(own, samples=tuple(samples), tokens=sum(n for _, n in everywhere))
        return Measurements.of_tensors(info, unified(without_last_hessians(self.known)))

    def _info(self, count: int) -> MeasurementsInfo:
        """Return what this process has seen after so many batches."""
        chosen = Batches(self.batches.batches[:count])
        samples = sorted(each for digests in _digests(chosen) for each in digests)
        return replace(self.about, samples=tuple(samples), tokens=chosen.num_tokens)


def _add_sensitivities(model: PreTrainedModel, calibration: Calibration, batch: Batch) -> None:
    """Run a batch forth and back, and take in the gradients of weights."""
    wanted = {
        name: statistic
        for (name, _), held in calibration.measurements.tensors().items()
        if isinstance(statistic := held.get(SENSITIVITY), Sensitivity)
    }
    if not wanted:
        return
    digests = sample_digests(batch["input_ids"], batch["attention_mask"])
    seeds = [int(digest[:12], 16) for digest in digests]
    device = next(model.parameters()).device
    add_sensitivities(model, wanted, moved(batch, device), seeds, call_model)


def _plan(
    model: PreTrainedModel, collected: Collection[str], *, calibrate_all_experts: bool = True
) -> Plan:
    """Plan for a model whose fused experts become modules, where they can be told apart."""
    for name in fused_experts(model):
        try:
            unfuse_experts(model, [name])
        except FusedExpertsError as error:
            error.add_hint("They are not measured.")
            warnings.warn(CalipersWarning(error.context.text), stacklevel=2)
        else:
            vars(model.get_submodule(name))["calibrate_all_experts"] = calibrate_all_experts
    return collecting_plan(model, collected)


def expected_memory(
    model: str | Path, collect: str | Collection[str] = (), *, trust_remote_code: bool = False
) -> int:
    """Estimate the bytes that the statistics of :func:`measure` take, without reading weights."""
    skeleton = load_skeleton(model, trust_remote_code=trust_remote_code)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)  # measure warns
        plan = _plan(skeleton, check_collected(collect))
    return statistics_bytes(skeleton, plan)


def _digests(batches: Batches) -> Iterator[list[str]]:
    return (sample_digests(each["input_ids"], each["attention_mask"]) for each in batches)


def _warn_of_unseen(measurements: Measurements) -> None:
    tensors = measurements.tensors()
    unseen = [
        ".".join(place)
        for place, statistics in tensors.items()
        if not all(each.num_tokens for each in statistics.values())
    ]
    if unseen:
        warning = CalipersWarning(
            f"{len(unseen)} of {counted(len(tensors), 'tensor')} saw no token: {shortened(unseen)}",
            hint="Merge with measurements of other data, or let experts see all tokens: "
            + Option("calibrate_all_experts", True)
            + ".",
        )
        warnings.warn(warning, stacklevel=3)
