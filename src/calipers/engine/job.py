"""What every run of data through a model takes: the model, where it computes, batches, a way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from calipers.calibration.coverage import UnseenPolicy
from calipers.calibration.data import Batches, calibration_batches, limits_of
from calipers.calibration.data.token_masks import check_mask
from calipers.calibration.pipelines import (
    Run,
    free_memory,
    run_basic,
    run_datafree,
    usable_device,
)
from calipers.calibration.sequential import run_sequential
from calipers.checkpoint.loading_progress import loading_counted
from calipers.checkpoint.reader import load_model, load_tokenizer
from calipers.checkpoint.source import check_apart
from calipers.errors import ConfigurationError, Option, not_allowed
from calipers.numerics.tensors import fingerprint
from calipers.options import MeasureOptions
from calipers.planning.plan import Plan
from calipers.runtime.offloading import without_accelerate_hooks
from calipers.runtime.precision import bytes_of_copies, dtype_choice, forward_dtype
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import Ranks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PipelineChoice = Literal["auto", "datafree", "basic", "sequential"]

PIPELINES: dict[str, Callable[[Run, Any], None]] = {
    "datafree": lambda run, _: run_datafree(run),
    "basic": run_basic,
    "sequential": run_sequential,
}


def check_options(options: MeasureOptions) -> None:
    """Refuse options that cannot be meant, before anything is read."""
    check_pipeline(options.calibration.pipeline)
    check_mask(options.data.mask)
    dtype_choice(options.compute.dtype)
    usable_device(options.compute.device)


def check_pipeline(pipeline: str) -> None:
    """Refuse a way of running data which there is not."""
    if pipeline not in get_args(PipelineChoice):
        raise not_allowed("pipeline", pipeline, get_args(PipelineChoice))


def check_on_unseen(policy: str) -> None:
    """Refuse a policy for modules that no token reached which there is not."""
    if policy not in get_args(UnseenPolicy):
        raise not_allowed("on_unseen", policy, get_args(UnseenPolicy))


def tensors_without_data(plan: Plan, model: torch.nn.Module) -> list[str]:
    """Name the tensors that need data; what was summed up before is data, too."""
    tensors = [
        f"{module.name}.{tensor.base_name}"
        for module, tensor in plan
        if tensor.needs_data and not tensor.has_data_on(model.get_submodule(module.name))
    ]
    return [*tensors, *(f"{name}.input" for name in plan.measured)]


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

    def choose_pipeline(
        self, plan: Plan, model: PreTrainedModel, device: torch.device, dtype: torch.dtype
    ) -> str:
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

    def agreed_pipeline(self, mine: str) -> str:
        """Return how all processes go: where memory is short on one device, layer by layer."""
        return "sequential" if "sequential" in self.ranks.share(mine) else mine
