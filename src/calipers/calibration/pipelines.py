"""How data runs through a model: not at all, through the whole, or layer by layer."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from calipers.calibration.context import Calibration
from calipers.calibration.coverage import EarlyLook
from calipers.calibration.data import Batch, Batches, counted_tokens
from calipers.errors import ConfigurationError, ModelRunError, Option, first_line, library_errors
from calipers.runtime.precision import computing_in, onloaded
from calipers.runtime.progress import Add, Progress
from calipers.runtime.ranks import Ranks

NewValues = Mapping[tuple[str, str], Tensor]
"""(module, tensor) → what the module computes with from now on."""


@dataclass(frozen=True)
class Part:
    """Modules that are ready to be solved together.

    :param names: theirs
    :param states: module → its tensors, if they were read from files for this part
    """

    names: tuple[str, ...]
    states: Mapping[str, dict[str, Tensor]] = field(default_factory=dict)


Parts = Generator[Part, NewValues, None]
"""Yields the parts of a model; each ``yield`` returns the new values that later parts must see."""


@dataclass(frozen=True)
class Run:
    """What a pipeline works with.

    :param device: where the model, or the layer at work, computes
    :param dtype: in which it does; None: its own
    :param early: warns of modules that no token has reached, while the data still runs
    :param after_batch: is called, with its number, when a batch has run through the whole model
    :param what: what is done with the data, as people are told
    """

    calibration: Calibration
    ranks: Ranks
    progress: Progress
    device: torch.device
    dtype: torch.dtype | None = None
    early: EarlyLook | None = None
    after_batch: Callable[[int], None] | None = None
    what: str = "calibrating"

    def counting_tokens(self, batches: Batches) -> AbstractContextManager[Add]:
        """Show how many tokens have run."""
        return self.progress.counting(self.what, batches.num_tokens, "tokens")

    def finish(self, names: Iterable[str]) -> Part:
        """End the measuring of some modules, which can be solved then."""
        part = Part(tuple(names))
        self.calibration.finish(part.names)
        return part


def run_datafree(run: Run, _: Batches | None = None) -> Parts:
    """Run no data: all modules can be solved at once."""
    yield run.finish(run.calibration.plan.names)


def run_basic(run: Run, batches: Batches) -> Parts:
    """Run each batch through the whole model."""
    calibration = run.calibration
    model = calibration.model
    head = getattr(model, "get_output_embeddings", lambda: None)()
    idle = [name for name, module in model.named_modules() if module is head]
    if any(map(calibration.measurements.needed, idle)):
        idle = []
    calibration.remove_hooks(idle)
    with onloaded([model], run.device):
        with (
            run.ranks.step("calibrating the model"),
            computing_in(run.dtype, [model]),
            run.counting_tokens(batches) as add,
        ):
            for index, batch in enumerate(batches):
                run.ranks.check()
                counted = counted_tokens(batch)
                with calibration.batch(index, counted):
                    call_model(model, moved(batch, run.device), skip_head=bool(idle))
                add(int(counted.sum()))
                if run.early is not None:
                    run.early.after(index, len(batches), calibration.plan.names)
                if run.after_batch is not None:
                    run.after_batch(index)
        yield run.finish(calibration.plan.names)


def call_model(model: torch.nn.Module, batch: Batch, *, skip_head: bool = False) -> Any:
    """Run a batch without a cache and, where the model can, without logits that nobody needs.

    Tokens have the positions they would have without padding. What no module takes is left out,
    such as columns that only data sets and trainers need.
    """
    accepted = inspect.signature(model.forward).parameters
    kwargs: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1 if skip_head else 0}
    mask = batch.get("attention_mask")
    if mask is not None and not bool(mask.all()):
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    wanted = {name: value for name, value in kwargs.items() if name in accepted}
    extra = batch.keys() - {"input_ids", "attention_mask"}
    if extra:
        # Models hand keywords that they do not know to their parts, so the parts are asked, too.
        forwards = {type(module).forward for module in model.modules()}
        known = {name for each in forwards for name in inspect.signature(each).parameters}
        batch = {name: value for name, value in batch.items() if name not in extra - known}
    with errors_of_forward(model):
        return model(**{**wanted, **batch})


def errors_of_forward(model: torch.nn.Module) -> AbstractContextManager[None]:
    """Tell what a model raises while it runs as an error about the model."""

    def error_of(words: str) -> ModelRunError:
        return ModelRunError(
            f"failed while data ran through it: {words}",
            subject=type(model).__name__,
            hint="If it fails in transformers by itself, too, compare its config.json with the "
            "original",
        )

    return library_errors(error_of)


def moved(value: Any, device: torch.device) -> Any:
    """Return a structure with its tensors on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


def usable_device(device: torch.device | str | None) -> torch.device | None:
    """Return a device on which something can be computed."""
    if device is None:
        return None
    try:
        usable = torch.device(device)
        float(torch.ones(1, device=usable).sum())
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"cannot be used: {first_line(str(error))}",
            subject=Option("device", str(device)),
            hint="Give a device of torch such as 'cpu' or 'cuda:0', or leave it out to compute "
            "where the model is",
        ) from error
    return usable


def free_memory(device: torch.device) -> int:
    """Return how many bytes a device has left for us."""
    if device.type != "cpu":
        free, _ = torch.accelerator.get_memory_info(device)
        return int(free)
    with suppress(OSError, ValueError, StopIteration), open("/proc/meminfo") as lines:
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    return sys.maxsize  # nobody tells
