"""How the processes of calibration/test_distributed.py fail, disagree and die; imported by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rank_jobs import RECIPES, found, llama, outcome, quantize, texts
from rank_processes import distributed_rank
from torch import distributed as dist

import calipers.engine.job
import calipers.engine.loop
import calipers.engine.oneshot
from calipers.calibration import pipelines as running
from calipers.judging import costs as judging
from calipers.observers import ObserverSpec
from calipers.runtime import distributed
from calipers.steps import quantization

SHORT = timedelta(seconds=6)  # somebody is missing
MANY = 2000  # batches of a process: they take far longer than it takes to notice


# Failures


class BrokenError(Exception):
    """What fails here fails on purpose."""


FAILURES: dict[str, tuple[int, Any, str]] = {
    "loading the model": (1, calipers.engine.job, "load_model"),
    "planning": (2, calipers.engine.oneshot, "plan_for"),
    "reading data": (0, calipers.engine.job, "calibration_batches"),
    "calibrating the model": (1, running, "call_model"),
    "working out the parameters of activations": (1, ObserverSpec, "solve_stream"),
    "working out the parameters of weights": (2, quantization, "solve_group"),
    "judging weights": (2, judging, "weight_loss"),
    "preparing the next step": (0, calipers.engine.oneshot, "report"),
    "freezing the model": (1, calipers.engine.loop, "give_schemes"),
    "writing the checkpoint": (0, calipers.engine.oneshot, "write_checkpoint"),
}


@contextmanager
def broken(rank: int, where: Any, name: str, how: Any) -> Iterator[None]:
    """Let a function fail in one process."""
    if distributed_rank() != rank:
        yield
        return
    with mock.patch.object(where, name, side_effect=how):
        yield


def everywhere_something_fails(folder: Path) -> Any:
    return {stage: failing(folder, stage) for stage in FAILURES}


def failing(folder: Path, stage: str) -> dict[str, Any]:
    rank, where, name = FAILURES[stage]
    model, output = llama(), folder / "nothing"
    before = description(model)
    with broken(rank, where, name, BrokenError("on purpose")):
        what = outcome(lambda: quantize(RECIPES["FP8"], model, output_dir=output))
    what["unchanged"] = description(model) == before
    what["output"] = [path.name for path in folder.iterdir() if "nothing" in path.name]
    return what


def not_a_number(folder: Path) -> dict[str, Any]:
    """The data of one process has a token whose embedding is not a number."""
    model, data = llama(), texts(7)
    with torch.no_grad():
        model.model.embed_tokens.weight[95] = torch.nan
    data[4][3] = 95
    before = description(model)
    what = outcome(lambda: quantize(RECIPES["FP8"], model, data, output_dir=folder / "nothing"))
    what["unchanged"] = description(model) == before
    return what


def description(model: Any) -> Any:
    """All that a failed run might have left behind."""
    return [
        (
            name,
            type(module).__name__,
            sorted(vars(module)),
            sorted(module._parameters),
            sorted(module._buffers),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
            "forward" in vars(module),
        )
        for name, module in model.named_modules()
    ]


# Arguments that differ


def different_arguments(_folder: Path) -> Any:
    rank = distributed_rank()
    other = llama()
    if rank == 2:
        other.model.layers[1].mlp.up_proj.weight.data.mul_(2)
    fp8 = RECIPES["FP8"]
    return {
        "recipe": outcome(lambda: quantize(RECIPES["NVFP4"] if rank == 1 else fp8)),
        "seed": outcome(lambda: quantize(fp8, seed=rank)),
        "model": outcome(lambda: quantize(fp8, other)),
        "pipeline": outcome(lambda: quantize(fp8, pipeline="basic" if rank else "sequential")),
        "method": outcome(lambda: quantize(fp8, method="gptq" if rank == 1 else "rtn")),
        "allow_code": outcome(lambda: quantize(fp8, allow_code=rank == 1)),
        "one is short of memory": outcome(one_short_of_memory),
    }


def one_short_of_memory() -> Any:
    """One process finds that the model does not fit: all go layer by layer."""
    choice = "sequential" if distributed_rank() == 1 else "basic"
    with mock.patch.object(calipers.engine.job.Job, "choose_pipeline", return_value=choice):
        return found(quantize(RECIPES["FP8"]))


BAD_JOBS = [everywhere_something_fails, not_a_number, different_arguments]


# Deaths


def killed(*_args: Any, **_kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS: dict[str, tuple[int, Any, str]] = {
    "calibrating the model": (2, running, "call_model"),
    "exchanging results": (1, distributed, "gather"),
    "merging statistics": (2, dist, "all_reduce"),
    "connecting": (1, dist, "new_group"),
}


def dying(folder: Path, stage: str, rank: int | None = None) -> dict[str, Any]:
    usual, where, name = DEATHS[stage]
    how = LateDeath(getattr(where, name)) if stage == "exchanging results" else killed
    model = llama()
    before = description(model)
    with broken(usual if rank is None else rank, where, name, how):
        what = outcome(
            lambda: quantize(RECIPES["FP8"], model, output_dir=folder / "nothing", timeout=SHORT)
        )
    what["unchanged"] = description(model) == before
    what["output"] = [path.name for path in folder.iterdir() if "nothing" in path.name]
    return what


def dying_in_a_long_step(folder: Path) -> dict[str, Any]:
    """One process dies while the others have a great many batches before them."""
    call, calls = running.call_model, []

    def slowly(*args: Any, **kwargs: Any) -> Any:
        calls.append(0)
        if len(calls) == 2 and distributed_rank() == 2:
            killed()
        time.sleep(0.05)
        return call(*args, **kwargs)

    data = texts(3 * MANY)
    options = {"num_calibration_samples": len(data), "output_dir": folder / "nothing"}
    with mock.patch.object(running, "call_model", slowly):
        what = outcome(lambda: quantize(RECIPES["FP8"], None, data, timeout=SHORT, **options))
    return {**what, "calls": len(calls)}


def gone_without_result(_folder: Path) -> None:
    dist.barrier()  # or the other one would not find this one, and would end first
    if distributed_rank() == 1:
        print("why it went", file=sys.stderr, flush=True)
        os._exit(3)


def slow_writer(folder: Path) -> dict[str, Any]:
    """Writing takes longer than the timeout."""
    patience = timedelta(seconds=2)
    write = calipers.engine.oneshot.write_checkpoint

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(1.5 * patience.total_seconds())
        return write(*args, **kwargs)

    with mock.patch.object(calipers.engine.oneshot, "write_checkpoint", slowly):
        return outcome(
            lambda: found(
                quantize(RECIPES["W4A16 optimal"], output_dir=folder / "late", timeout=patience)
            )
        )


class LateDeath:
    """Dies when it is called for the fourth time, when there is something to lose."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.calls = real, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 4:
            killed()
        return self.real(*args, **kwargs)
