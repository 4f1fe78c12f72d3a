"""What every run of data through a model takes: the model, where it computes, batches, a way."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from calipers.calibration.data import Batches, calibration_batches, limits_of
from calipers.calibration.data.columns import check_mask
from calipers.checkpoint.auxiliary_files import check_apart, source_folder
from calipers.checkpoint.output import check_output
from calipers.checkpoint.reader import load_model, load_tokenizer, loading_counted
from calipers.checkpoint.writer import parse_size
from calipers.errors import (
    Call,
    ConfigurationError,
    MeasurementsError,
    Mistakes,
    Option,
    check_whole_number,
    counted,
    no_meaning,
    not_allowed,
)
from calipers.measurements import Measurements
from calipers.measurements.info import sample_fold
from calipers.measurements.tensors import FOLDS
from calipers.numerics.tensors import fingerprint
from calipers.options import (
    ComputeOptions,
    DataOptions,
    MeasureOptions,
    OneshotOptions,
    OnUnseen,
    Pipeline,
)
from calipers.planning.plan import Plan
from calipers.recipes import Recipe, load_changed_recipe
from calipers.runtime.environment import find_launch
from calipers.runtime.offloading import without_accelerate_hooks
from calipers.runtime.precision import (
    bytes_of_copies,
    dtype_choice,
    forward_dtype,
    free_memory,
    usable_device,
)
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def read_arguments(
    model: Any, recipe: Any, dataset: Any, measurements: Any, options: OneshotOptions
) -> tuple[Recipe, Measurements | None]:
    """Read the recipe, with all changes put on top, and the measurements that stand for data.

    All that is wrong with what a call is given is refused at once.
    """
    mistakes = Mistakes()
    inputs = {"model": model, "recipe": recipe, "data": dataset, "measurements": measurements}
    mistakes.check(check_arguments, inputs, options)
    parsed = mistakes.check(load_changed_recipe, recipe, **options.changes.values())
    seen = None
    if measurements is not None:
        seen = mistakes.check(read_measurements, measurements)
    mistakes.tell()
    return (parsed if seen is None else parsed.on_float_inputs()), seen


def check_arguments(inputs: Mapping[str, Any], options: OneshotOptions) -> None:
    """Check all that a call is given but the recipe; nothing is loaded.

    :param inputs: what the checkpoint is made from: ``model``, ``data``, ``measurements``, …
    """
    mistakes, output = Mistakes(), options.output
    if output.output_dir is not None:
        model = inputs["model"]
        start = model if isinstance(model, (str, Path)) else source_folder(model)
        sources = {**inputs, "model": start, "tokenizer": options.data.tokenizer}
        mistakes.check(check_output, output.output_dir, output.overwrite, sources)
    mistakes.check(parse_size, output.max_shard_size)
    mistakes.check(check_options, options)
    if inputs.get("measurements") is not None:
        mistakes.check(check_not_running, options, inputs.get("data"))
    mistakes.tell()


def check_options(options: MeasureOptions) -> None:
    """Refuse options that cannot be meant, all at once, before anything is read."""
    mistakes, calibration = Mistakes(), options.calibration
    mistakes.check(check_data_options, options.data)
    mistakes.check(check_compute_options, options.compute)
    mistakes.check(check_folds, calibration.folds)
    for name, choices in (("pipeline", get_args(Pipeline)), ("on_unseen", get_args(OnUnseen))):
        if (value := getattr(calibration, name)) not in choices:
            mistakes.add(not_allowed(name, value, choices))
    mistakes.tell()


def check_folds(folds: object) -> None:
    """Refuse numbers of folds that there cannot be."""
    check_whole_number("folds", folds, least=1)
    if folds > len(FOLDS):  # type: ignore[operator]
        raise not_allowed("folds", folds, f"1 to {len(FOLDS)}")


def check_data_options(data: DataOptions) -> None:
    """Refuse samples that cannot be taken, for every reason at once."""
    mistakes = Mistakes()
    for name, least in (("num_samples", 1), ("max_seq_length", 1), ("batch_size", 1), ("skip", 0)):
        value = getattr(data, name)
        if value is not None or name in ("num_samples", "skip"):
            mistakes.check(check_whole_number, name, value, least)
    mistakes.check(check_whole_number, "seed", data.seed)
    mistakes.check(check_mask, data.mask)
    mistakes.tell()


def check_compute_options(compute: ComputeOptions) -> None:
    """Refuse where and how nothing can be computed."""
    mistakes = Mistakes()
    mistakes.check(dtype_choice, compute.dtype)
    mistakes.check(usable_device, compute.device)
    mistakes.tell()


def check_not_running(options: OneshotOptions, dataset: Any = None) -> None:
    """Refuse data, options of a model that runs, and more than one process, where none runs."""
    if dataset is not None:
        problem = "There are both " + Option("dataset") + " and " + Option("measurements")
        raise ConfigurationError(problem, hint="Keep one: measurements stand for data.")
    compute = options.compute
    if compute.gives("dtype") and compute.dtype != "auto":
        raise no_meaning("dtype", compute.dtype, "a model that does not run")
    processes = find_launch().world_size
    if processes > 1:
        raise ConfigurationError(
            f"Quantizing without data is work for one process, and this is one of {processes}",
            hint="Start it by itself, or calibrate with data, which all of them share.",
        )


def read_measurements(measurements: Measurements | str | Path) -> Measurements:
    """Read measurements; those of a run that has not finished are refused."""
    if isinstance(measurements, (str, Path)):
        measurements = Measurements.load(measurements)
    if measurements.info is None or not measurements.info.is_complete:
        raise MeasurementsError(
            "are not those of a finished run",
            subject="The measurements",
            hint="Let 'calipers measure' finish: with the same arguments it goes on where it was.",
        )
    return measurements


def tensors_without_data(plan: Plan, model: torch.nn.Module) -> list[str]:
    """Name the tensors that need data; what was summed up before is data, too."""
    tensors = [
        f"{module.name}.{tensor.base_name}"
        for module, tensor in plan
        if tensor.needs_data and not tensor.has_data_on(model.get_submodule(module.name))
    ]
    measured = dict.fromkeys([*plan.measured, *plan.measured_before])
    inputs = (f"{name}.input" for name in measured)
    return [*tensors, *inputs, *(f"the whole model ({step})" for step in plan.finishing)]


def data_missing(tensors: Sequence[str], problem: str, remedy: str) -> ConfigurationError:
    """Return the error of a plan that needs data where there is none."""
    return ConfigurationError(
        f"The recipe needs data for {counted(len(tensors), 'tensor')} (the first is {tensors[0]}), "
        "and " + problem,
        hint=remedy
        + ", or choose dynamic activations and observers that look at weights alone. "
        + Call("plan.table")
        + " shows which tensors need data",
    )


@dataclass(frozen=True)
class Job:
    """The parts of a call, in the order in which all processes take them."""

    options: MeasureOptions
    ranks: Ranks
    progress: Progress

    @contextmanager
    def loaded(
        self, model: Any, *, apart_from: str | os.PathLike[str] | None = None
    ) -> Iterator[tuple[PreTrainedModel, Any]]:
        """Load the model and its tokenizer, and have the model ready to be read.

        :param apart_from: an output folder, in which the model must not be
        """
        options, ranks = self.options, self.ranks
        trusted = options.compute.trust_remote_code
        with (
            ranks.step("loading the model"),
            self.progress.waiting("loading the model") as begin,
            loading_counted(begin),
        ):
            lazily = options.calibration.pipeline == "sequential" and ranks.world_size == 1
            device = usable_device(options.compute.device) or torch.device("cpu")
            loaded = load_model(
                model, trust_remote_code=trusted, on_disk_for=device if lazily else None
            )
            if apart_from is not None:
                check_apart(apart_from, loaded)
            tokenizer = load_tokenizer(options.data.tokenizer, loaded, trust_remote_code=trusted)
        with without_accelerate_hooks(loaded):
            if ranks.world_size > 1:
                ranks.agree({"model": fingerprint(loaded)})
            yield loaded, tokenizer

    def device_and_dtype(self, model: PreTrainedModel) -> tuple[torch.device, torch.dtype]:
        """Return where the model computes, and in which dtype."""
        device = usable_device(self.options.compute.device) or model.device
        dtype = forward_dtype(dtype_choice(self.options.compute.dtype), model, device)
        if str(torch.float32) in self.ranks.share(str(dtype)):
            dtype = torch.float32  # where one CPU is slow, all do the same
        return device, dtype

    def batches_for(
        self, model: PreTrainedModel, dataset: Any, tokenizer: Any, *, for_ranges: bool, **cut: Any
    ) -> Batches:
        """Load the share of this process.

        :param for_ranges: whether ranges are found with it, for which little data is too little
        :param cut: what batches must not reach over: see ``Sampling``
        """
        data, ranks = self.options.data, self.ranks
        return calibration_batches(
            dataset,
            tokenizer,
            **{**data.sampling(), **limits_of(model, data.max_seq_length)},
            **cut,
            use="ranges" if for_ranges else "importance",
            rank=ranks.rank,
            world_size=ranks.world_size,
        )

    def in_folds(self) -> dict[str, Any]:
        """Return the options by which batches are of one fold of the data each."""
        count = self.options.calibration.folds
        return {"part_of": partial(sample_fold, count=count)} if count > 1 else {}

    def check_samples(self, batches: Batches) -> None:
        """Refuse more folds than there are samples in all processes."""
        calibration = self.options.calibration
        samples = sum(self.ranks.share(batches.num_samples))
        if samples < calibration.folds and calibration.gives("folds"):
            raise ConfigurationError(
                f"is more than the data has samples: {samples}",
                subject=Option("folds", calibration.folds),
                hint="Give at most one fold for each sample, or more data.",
            )

    def choose_pipeline(
        self, plan: Plan, model: PreTrainedModel, device: torch.device, dtype: torch.dtype
    ) -> Pipeline:
        """Return how data runs through a model: as a whole, if what is copied for it has room."""
        choice = self.options.calibration.pipeline
        if plan.propagation != "float":
            if choice == "basic":
                raise ConfigurationError(
                    "runs the whole model at once, but the recipe calibrates layers on what those "
                    f"before them have become (error_propagation: {plan.propagation})",
                    subject=Option("pipeline", "basic"),
                    hint="Leave it out, or give the recipe 'error_propagation: float'",
                )
            return "sequential"
        if choice != "auto":
            return choice
        size = bytes_of_copies(model, dtype, device)
        return "basic" if not size or size < 0.8 * free_memory(device) else "sequential"

    def agreed_pipeline(self, mine: Pipeline) -> Pipeline:
        """Return how all processes go: where memory is short on one device, layer by layer."""
        return "sequential" if "sequential" in self.ranks.share(mine) else mine
