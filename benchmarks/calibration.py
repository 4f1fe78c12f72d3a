"""How long the whole way takes, from a model and a recipe to a checkpoint, beside llm-compressor.

Both libraries take turns in one process, with the same model, batches and scheme; of each the
fastest run counts. The model is loaded before the clock starts. Sections:

- ``oneshot``: ``calipers.oneshot`` and that of the peer, without and with writing.
- ``observing``: a forward pass alone and under observers of all inputs, each tensor measured once
  for all that read it (shared) or once by each of them (apart).

On a machine that is not quiet, processor time says more than time (only with one thread).

    python benchmarks/calibration.py --quick --model wide --processor-time
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import OURS, PEER  # says what to do if the peer is not installed
from racing import Prepare, calling, race, seconds_of_others
from recipes import INT8, Recipe, grouped, quantized, recipe
from rich.console import Console
from running import run_oneshot
from stories import load_model, load_stories, load_tokenizer
from tables import Column, Measured, Row, Section, number, show
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from calipers.calibration.context import Calibration
from calipers.calibration.pipelines import call_model
from calipers.kernels import describe
from calipers.recipes import load_recipe
from calipers.steps import QuantizationModifier

RESULTS = Path(__file__).parent / "results" / "calibration.json"
ROUNDS = 3
FULL, QUICK = (128, 512), (16, 256)  # sequences and their length
OBSERVERS = ("static_minmax", "minmax", "histogram_mse", "mse")


class Case(NamedTuple):
    """A scheme, how ours and the peer's observer of it are called, and their recipes."""

    scheme: str
    ours: str
    peer: str
    of: Callable[[str], Recipe]


def fp8_static(observer: str) -> Recipe:
    """Observe inputs in FP8."""
    return recipe(quantized("FP8", inputs={"observer": observer}))


def int8_static(observer: str) -> Recipe:
    """Observe inputs in INT8."""
    group = quantized("W8A8")
    return recipe({**group, "input_activations": {**INT8, "observer": observer}})


def four_bits(observer: str) -> Recipe:
    """Observe weights of four bits."""
    return recipe(grouped(4, observer=observer))


CASES = (
    Case("FP8", "static_minmax", "static_minmax", fp8_static),
    Case("W8A8 static", "mse", "mse", int8_static),
    Case("W8A8 static", "histogram_mse", "mse", int8_static),
    Case("W4A16", "memoryless_mse", "memoryless_mse", four_bits),
    Case("W4A16", "imatrix_mse", "imatrix_mse", four_bits),
    Case("NVFP4", "–", "–", lambda _: recipe(quantized("NVFP4"))),
)


def main() -> int:
    """Measure the sections, print each as soon as it is done, and save them."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    console = Console(width=124, highlight=False)
    facts = {name: version(name) for name in ("torch", "calipers", "llmcompressor")}
    load = [round(each, 2) for each in os.getloadavg()]
    console.print(f"{options.model}, load {load}, {facts}\n{describe()}\n")
    results: dict[str, Any] = {}
    for name in options.only or SECTIONS:
        section = SECTIONS[name]
        started, used = time.perf_counter(), seconds_of_others()
        rows = list(section.measure(options))
        used = max(0.0, seconds_of_others() - used) / (time.perf_counter() - started)
        show(console, section, Measured(rows, used))
        results[name] = {"rows": rows, "cores_used_by_others": used, "load": os.getloadavg()}
    if not options.quick:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        saved = {**facts, "model": options.model, "results": results}
        RESULTS.write_text(json.dumps(saved, indent=2) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time of calibration against the peer.")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS))
    parser.add_argument("--model", choices=list(MODELS), default="stories15M")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="less data; save nothing")
    parser.add_argument(
        "--processor-time", action="store_true", help="of oneshot, for busy machines; one thread"
    )
    return parser.parse_args()


# The model and the data


def wide_llama() -> Any:
    """Return a random model that is wider than stories15M and reads the same tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        tie_word_embeddings=True,
    )
    build: Any = LlamaForCausalLM
    return build(config).to(torch.bfloat16).eval()


MODELS: dict[str, Callable[[], Any]] = {"stories15M": load_model, "wide": wide_llama}


def sequences(options: argparse.Namespace) -> list[Tensor]:
    """Return stories one after the other, cut into batches of one sequence."""
    count, length = QUICK if options.quick else FULL
    tokens = torch.cat(load_stories("calibration"), dim=-1)
    return list(tokens[0, : count * length].view(count, 1, length))


def described(batches: list[Tensor]) -> Row:
    """Say how much data there is."""
    return {"sequences": len(batches), "length": batches[0].shape[1]}


# The whole way


def measure_oneshot(options: argparse.Namespace) -> Iterator[Row]:
    """Race both libraries through every case."""
    model, batches = MODELS[options.model](), sequences(options)
    clock = time.process_time if options.processor_time else time.perf_counter
    known: dict[str, float] = {}  # the peer does the same in several cases
    for case in CASES:
        lanes: dict[str, Callable[[], float]] = {}
        for library, observer in ((OURS, case.ours), (PEER, case.peer)):
            for written in (False, True):
                lane = f"{library} {case.scheme} {observer} {written}"
                if lane not in known:
                    lanes[lane] = lap(library, model, case.of(observer), batches, written, clock)
        known |= take_turns(lanes)
        ours, ours_written, peer, peer_written = (
            known[f"{library} {case.scheme} {observer} {written}"]
            for library, observer in ((OURS, case.ours), (PEER, case.peer))
            for written in (False, True)
        )
        yield {
            **described(batches),
            "scheme": case.scheme,
            "ours": case.ours,
            "peer": case.peer,
            "ours_seconds": ours,
            "peer_seconds": peer,
            "times_faster": peer / ours,
            "ours_written_seconds": ours_written,
            "peer_written_seconds": peer_written,
            "times_faster_written": peer_written / ours_written,
        }


def take_turns(lanes: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return the shortest time of each lane."""
    times: dict[str, list[float]] = {name: [] for name in lanes}
    for _ in range(ROUNDS):
        for name, run in lanes.items():
            times[name].append(run())
    return {name: min(found) for name, found in times.items()}


def lap(
    library: str,
    model: Any,
    given: Recipe,
    batches: list[Tensor],
    written: bool,
    clock: Callable[[], float],
) -> Callable[[], float]:
    """Return a function that runs all of it once on a copy of the model, and times it."""
    tokenizer = load_tokenizer()

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            goal = Path(folder) / "checkpoint" if written else None
            own = deepcopy(model)
            started = clock()
            run_oneshot(library, own, given, batches, tokenizer, goal)
            return clock() - started

    return run


# Observing


def measure_observing(options: argparse.Namespace) -> Iterator[Row]:
    """Race forward passes with and without observers."""
    model, batches = MODELS[options.model](), sequences(options)
    lanes: dict[str, list[Prepare]] = {"bare": [calling(forward, model, batches)]}
    for observer in OBSERVERS:
        for shared in (True, False):
            lanes[f"{observer} {shared}"] = [watching(model, observer, batches, shared)]
    found = race(lanes, options.quick)
    for observer in OBSERVERS:
        yield {
            **described(batches),
            "observer": observer,
            "bare_seconds": found["bare"],
            "shared_seconds": found[f"{observer} True"],
            "apart_seconds": found[f"{observer} False"],
            "shared_to_bare": found[f"{observer} True"] / found["bare"],
            "apart_to_bare": found[f"{observer} False"] / found["bare"],
        }


@torch.no_grad()
def forward(model: Any, batches: list[Tensor]) -> None:
    """Run the model as calibration does, without logits."""
    for batch in batches:
        call_model(model, {"input_ids": batch}, skip_head=True)


def watching(model: Any, observer: str, batches: list[Tensor], shared: bool) -> Prepare:
    """Run the model with new observers of all inputs."""
    plan = load_recipe(QuantizationModifier(**fp8_static(observer))).compile(model)

    def prepare() -> Callable[[], object]:
        calibration = Calibration(model, plan, share_inputs=shared)

        def run() -> None:
            with calibration:
                for index, batch in enumerate(batches):
                    with calibration.batch(index):
                        call_model(model, {"input_ids": batch}, skip_head=True)
                calibration.finish(plan.names)

        return run

    return prepare


def long(value: float) -> str:
    """Write seconds."""
    return f"{number(value)} s"


OURS_COLUMN, PEER_COLUMN = Column("ours", "ours"), Column("peer's", "peer")
DATA = "{sequences} sequences of {length} tokens"
SECTIONS = {
    "oneshot": Section(
        measure_oneshot,
        f"From a model in memory to a frozen one, and to a checkpoint: {DATA}",
        (
            Column("scheme", "scheme"),
            OURS_COLUMN,
            PEER_COLUMN,
            Column("ours", "ours_seconds", long),
            Column("peer", "peer_seconds", long),
            Column("faster", "times_faster", number, "peer ÷ ours."),
            Column("ours, written", "ours_written_seconds", long),
            Column("peer, written", "peer_written_seconds", long),
            Column("faster", "times_faster_written", number),
        ),
    ),
    "observing": Section(
        measure_observing,
        f"Forward passes while the inputs of all Linears are observed: {DATA}",
        (
            Column("observer", "observer"),
            Column("bare", "bare_seconds", long, "without observers and logits."),
            Column("shared", "shared_seconds", long, "a tensor is measured once for all readers."),
            Column("÷ bare", "shared_to_bare", number),
            Column("apart", "apart_seconds", long, "every module measures its input."),
            Column("÷ bare", "apart_to_bare", number),
        ),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
