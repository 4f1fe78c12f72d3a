"""What ``calipers.measure`` adds to the forward pass, with the statistics it collects by default.

The model runs bare, measured in one, and measured in two halves of the batches that are kept apart,
as ``calipers.measure`` does: in turns in one process, over the same batches of one sequence. Of
each batch the fastest run counts, so that what other programs do meanwhile hardly does; what is
done once, at the end, is added. On a machine that is not quiet, processor time says more than time
(only with one thread).

    python benchmarks/measuring.py --model stories15M --dtype float32
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from racing import seconds_of_others
from random_llama import llama_100m
from rich.console import Console
from stories import load_model, load_stories
from tables import Column, Measured, Row, Section, number, show
from torch import Tensor

from calipers.calibration.context import Calibration
from calipers.calibration.pipelines import call_model
from calipers.kernels import describe
from calipers.measurements.tensors import with_folds
from calipers.planning.measuring import collecting_plan
from calipers.runtime.precision import forward_dtype

DTYPES = ("float32", "bfloat16")


MODELS: dict[str, Callable[[], Any]] = {"stories15M": load_model, "llama100M": llama_100m}


def main() -> int:
    """Measure every model in every dtype, and print each as soon as it is done."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    console = Console(width=124, highlight=False)
    console.print(f"{describe()}\n")
    rows = []
    started, used = time.perf_counter(), seconds_of_others()
    for name in options.model:
        for dtype in options.dtype:
            rows.append(measured_row(name, getattr(torch, dtype), options))
            console.print(f"{name} {dtype}: {rows[-1]['added_percent']:.1f} % added")
    used = max(0.0, seconds_of_others() - used) / (time.perf_counter() - started)
    show(console, TABLE, Measured(rows, used))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="What measuring adds to the forward pass.")
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--tokens", type=int, default=1 << 14)
    parser.add_argument("--length", type=int, default=2048, help="of a sequence, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--processor-time", action="store_true", help="for busy machines")
    return parser.parse_args()


def measured_row(name: str, dtype: torch.dtype, options: argparse.Namespace) -> Row:
    """Let a model run bare and measured, in turns."""
    model = MODELS[name]().to(dtype)
    length = min(options.length, model.config.max_position_embeddings)
    batches = sequences(options.tokens // length, length)
    clock = time.process_time if options.processor_time else time.perf_counter
    bare, whole, measured = [], [], []
    halves = [index % 2 for index in range(len(batches))]
    for _ in range(options.rounds):
        bare.append(run_bare(model, batches, clock))
        whole.append(run_measured(model, batches, clock))
        measured.append(run_measured(model, batches, clock, halves))
    bare_seconds, seconds = total_of_fastest(bare), total_of_fastest(measured)
    whole_seconds = total_of_fastest(whole)
    return {
        "model": name,
        "dtype": str(dtype).removeprefix("torch."),
        "data": f"{len(batches)} × {length}",
        "bare_seconds": bare_seconds,
        "whole_seconds": whole_seconds,
        "seconds": seconds,
        "added_percent": 100 * (seconds - bare_seconds) / bare_seconds,
        "halves_percent": 100 * (seconds - whole_seconds) / bare_seconds,
        "instruction_set": describe().instruction_set or "torch",
        "threads": options.threads,
    }


def sequences(count: int, length: int) -> list[Tensor]:
    """Return stories one after the other, cut into batches of one sequence."""
    tokens = torch.cat(load_stories("calibration"), dim=-1)[0]
    repeated = tokens.repeat(-(-count * length // len(tokens)))
    return list(repeated[: count * length].view(count, 1, length))


@torch.no_grad()
def run_bare(model: Any, batches: list[Tensor], clock: Callable[[], float]) -> list[float]:
    """Return how long the model takes for each batch."""
    times = [clock()]
    for batch in batches:
        call_model(model, with_mask(batch))
        times.append(clock())
    return differences(times)


def run_measured(
    model: Any, batches: list[Tensor], clock: Callable[[], float], halves: list[int] | None = None
) -> list[float]:
    """Return the same while all inputs are measured, and how long it takes to finish."""
    plan = collecting_plan(model)
    dtype = forward_dtype("auto", model, model.device)
    count = 1 if halves is None else 2
    with Calibration(
        model, plan, dtype=dtype, num_folds=count, fold_of_batch=halves or ()
    ) as calibration:
        times = [clock()]
        for index, batch in enumerate(batches):
            given = with_mask(batch)
            with calibration.batch(index, given["attention_mask"]):
                call_model(model, given)
            times.append(clock())
        calibration.finish(plan.measured)
        if halves is not None:
            with_folds([fold.tensors() for fold in calibration.folds])
        times.append(clock())
    return differences(times)


def with_mask(batch: Tensor) -> dict[str, Tensor]:
    """Return what a model is called with."""
    return {"input_ids": batch, "attention_mask": torch.ones_like(batch)}


def differences(times: list[float]) -> list[float]:
    """Return how long each step took."""
    return [end - start for start, end in pairwise(times)]


def total_of_fastest(rounds: list[list[float]]) -> float:
    """Take the fastest of all rounds for each step, and add them up."""
    fastest: list[float] = [min(times) for times in zip(*rounds, strict=True)]
    return sum(fastest)


def long(value: float) -> str:
    """Write seconds."""
    return f"{number(value)} s"


TABLE = Section(
    lambda _: [],
    "Forward passes bare and under the default statistics of calipers.measure",
    (
        Column("model", "model"),
        Column("dtype", "dtype"),
        Column("data", "data", str, "sequences × tokens of each."),
        Column("bare", "bare_seconds", long),
        Column("in one", "whole_seconds", long),
        Column("measured", "seconds", long, "in two halves."),
        Column("added %", "added_percent", "{:.1f}".format, "of the bare pass."),
        Column("by halves %", "halves_percent", "{:.1f}".format, "the part that is due to halves."),
        Column("instructions", "instruction_set"),
        Column("threads", "threads"),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
