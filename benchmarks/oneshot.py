"""How long ``calipers.oneshot`` takes as a whole, beside what no such run can do without.

A random Llama of 95 million parameters goes from its folder to a checkpoint in W4A16, by the
observer ``optimal`` under E[x²]. What it cannot do without takes turns with it in one process:

- load: transformers loads the model from the folder. oneshot does that too; it counts on both
  sides.
- forward: the loaded model runs over the same batches, without gradients, in the dtype in which
  oneshot lets it compute, and without logits, which nobody needs. ``with logits`` is the same as
  ``model(ids)`` does it; it is shown to compare, and not judged by.
- copy: the files of the model are copied, until they are on the disk.

The fastest of several rounds counts, of each.

    python benchmarks/oneshot.py --dtype bfloat16 --samples 64 --length 512
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from racing import seconds, seconds_of_others
from random_llama import llama_100m
from rich.console import Console
from streaming import copy_files, long
from tables import Column, Goal, Measured, Row, Section, judged, mark, number, show
from torch import Tensor
from transformers import AutoModelForCausalLM

import calipers
from calipers.calibration.pipelines import call_model
from calipers.kernels import describe
from calipers.runtime.precision import forward_dtype

DTYPES = ("bfloat16", "float32")
OBSERVER = {"name": "optimal", "importance": "imatrix"}
GOAL = Goal("ratio", "≤", 1.15)


def main() -> int:
    """Measure every dtype, and print the table."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    console = Console(width=124, highlight=False)
    console.print(f"{describe()}\n")
    started, used = time.perf_counter(), seconds_of_others()
    rows = [measured_row(dtype, options) for dtype in options.dtype]
    used = max(0.0, seconds_of_others() - used) / (time.perf_counter() - started)
    show(console, TABLE, Measured(rows, used))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="The whole of oneshot, beside its least.")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES[:1], help="stored")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=512, help="of a sample, in tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def measured_row(dtype: str, options: argparse.Namespace) -> Row:
    """Let all take turns on one model, and compare them."""
    with tempfile.TemporaryDirectory(prefix="calipers-") as place:
        source, goal = Path(place) / "model", Path(place) / "output"
        llama_100m().to(getattr(torch, dtype)).save_pretrained(source)
        found = take_turns(lanes(source, goal, options), options.rounds)
    least = found["load"] + found["forward"] + found["copy"]
    row = {
        "dtype": dtype,
        "data": f"{options.samples} × {options.length}",
        **found,
        "least": least,
        "ratio": found["oneshot"] / least,
        "goal": GOAL.bound,
    }
    return judged(row, [GOAL])


def lanes(source: Path, goal: Path, options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Return what is timed, each as a function that runs once and returns its seconds."""
    torch.manual_seed(0)
    model = load(source)
    samples = torch.randint(model.config.vocab_size, (options.samples, options.length))
    model.to(forward_dtype("auto", model, model.device))
    return {
        "load": partial(seconds, partial(load, source)),
        "forward": partial(seconds, partial(forward, model, samples, skip_head=True)),
        "with_logits": partial(seconds, partial(forward, model, samples, skip_head=False)),
        "copy": partial(copy_files, source, goal),
        "oneshot": partial(quantize, source, samples, goal),
    }


def take_turns(given: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the shortest time of each lane."""
    times = [{name: run() for name, run in given.items()} for _ in range(rounds)]
    return {name: min(each[name] for each in times) for name in given}


def load(source: Path) -> Any:
    """Load the model as it is stored."""
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    return model.eval()


@torch.no_grad()
def forward(model: Any, samples: Tensor, *, skip_head: bool) -> None:
    """Run the samples one by one, as oneshot does by default."""
    for ids in samples.unsqueeze(1):
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        call_model(model, batch, skip_head=skip_head)


def quantize(source: Path, samples: Tensor, goal: Path) -> float:
    """Return the seconds of the whole way; what it writes is removed."""
    run = partial(
        calipers.oneshot,
        source,
        "W4A16",
        samples,
        weight_observer=OBSERVER,
        output_dir=goal,
        num_calibration_samples=len(samples),
        progress=False,
    )
    taken = seconds(run)
    shutil.rmtree(goal)
    os.sync()  # what is not on the disk yet would be written during the next run
    return taken


TABLE = Section(
    lambda _: [],
    "oneshot of a model of 95 M parameters, W4A16, optimal, imatrix: {data} tokens",
    (
        Column("stored", "dtype"),
        Column("load", "load", long, "from the folder into memory, by transformers."),
        Column("forward", "forward", long, "all batches, bare, without logits."),
        Column("with logits", "with_logits", long, "the same with logits; not in the sum."),
        Column("copy", "copy", long, "of the files, with fsync."),
        Column("sum", "least", long, "load + forward + copy."),
        Column("oneshot", "oneshot", long, "the whole call, from folder to checkpoint."),
        Column("÷ sum", "ratio", number, "oneshot ÷ sum."),
        Column("goal", "goal", "≤ {:g}".format),
        Column("", "reached", mark),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
