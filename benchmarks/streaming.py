"""From the files of a model to those of a quantized checkpoint, beside llm-compressor.

A random Llama of about a billion parameters is written in several files, and read once so that the
page cache is warm. Every run is a process of its own, which imports its library, then takes the
time of one call, its processor time and its peak of resident memory; of several runs the fastest
counts. Sections:

- ``speed``: ``calipers.quantize`` beside the peer's ``oneshot`` on the same folder.
- ``copy``: the same beside a plain copy of the files; ours and the copy end with fsync.
- ``memory``: the peak of ours, on that model and on one with twice as many layers.
- ``schemes``: ten checkpoints from one measurement of stories15M, beside one calibration of the
  peer.

The peer's search takes more than ten minutes; with ``--peer-layers`` it runs on fewer layers. On a
machine that is not quiet, set ``OMP_WAIT_POLICY=passive``: threads of torch that wait for each
other then do not keep the cores busy.

    python benchmarks/streaming.py --layers 4 --peer-layers 1 --quick
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from racing import seconds_of_others
from random_llama import quantized_weights, write_model
from recipes import GROUP, Recipe, quantized, recipe
from rich.console import Console
from streaming_jobs import OURS, PEER, SCHEMES, STORIES, stories_folder
from tables import Column, Measured, Row, Section, at_least, mark, number, show

from calipers.kernels import describe

RESULTS = Path(__file__).parent / "results" / "streaming.json"
JOBS = Path(__file__).with_name("streaming_jobs.py")
ROUNDS = 3
PEER_SECONDS = 60.0  # after as many, the peer is not run again
GIB = 1 << 30
MOST_MEMORY, MOST_GROWTH = 1.5 * GIB, 0.2
LEAST_OF_COPY = 0.5


class Case(NamedTuple):
    """A preset, the observer of its weights, and how many times faster than the peer it must be."""

    scheme: str
    observer: str
    goal: float = 1

    @property
    def recipe(self) -> Recipe:
        """What both libraries are given."""
        return recipe(quantized(self.scheme, weights={"observer": self.observer}))


CASES = (
    Case("W4A16", "memoryless_minmax"),
    Case("W4A16", "memoryless_mse", 15),
    Case("NVFP4A16", "memoryless_minmax"),
    Case("NVFP4A16", "memoryless_mse", 50),
)
PLAINEST = CASES[0]


def main() -> int:
    """Measure the sections, print each as soon as it is done, and save them."""
    options = parse_arguments()
    console = Console(width=124, highlight=False)
    facts = {name: version(name) for name in ("torch", "calipers", "llmcompressor")}
    load = [round(each, 2) for each in os.getloadavg()]
    waiting = os.environ.get("OMP_WAIT_POLICY", "as by default")
    console.print(f"load {load}, {facts}\n{describe()}\nthreads of torch wait: {waiting}\n")
    results: dict[str, Any] = {}
    options.known = {}
    with place_of(options) as options.place:
        for name in options.only or SECTIONS:
            section = SECTIONS[name]
            started, used = time.perf_counter(), seconds_not_ours()
            rows = list(section.measure(options))
            used = max(0.0, seconds_not_ours() - used) / (time.perf_counter() - started)
            if rows:
                show(console, section, Measured(rows, used))
            results[name] = {"rows": rows, "cores_used_by_others": used, "load": os.getloadavg()}
    if not options.quick:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        saved = {**facts, "layers": options.layers, "results": results}
        RESULTS.write_text(json.dumps(saved, indent=2) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="From files to files, beside the peer.")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS))
    parser.add_argument("--layers", type=int, default=22, help="of the model; 22 are a billion")
    parser.add_argument(
        "--peer-layers", type=int, help="let the peer work on fewer layers, and scale its time"
    )
    parser.add_argument("--keep", type=Path, help="a folder for the models, kept for the next run")
    parser.add_argument("--quick", action="store_true", help="run all once; save nothing")
    return parser.parse_args()


@contextmanager
def place_of(options: argparse.Namespace) -> Iterator[Path]:
    """Give a folder for models and checkpoints, on the disk where models are kept."""
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="calipers-", dir=options.keep) as place:
        yield Path(place)


def seconds_not_ours() -> float:
    """Return the processor time so far that neither we nor our processes used."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds_of_others() - children.ru_utime - children.ru_stime


def model_of(options: argparse.Namespace, layers: int) -> Path:
    """Return the folder of a model, which is written if it is not there, with its files read."""
    place: Path = options.keep or options.place
    folder = place / f"llama-{layers}"
    if not (folder / "config.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        write_model(folder, layers)
    for file in folder.iterdir():
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass
    return folder


def run_apart(options: argparse.Namespace, job: str, **settings: Any) -> Row:
    """Run a job in a fresh process; what it writes is removed."""
    output = options.place / "output"
    given = json.dumps({**settings, "output": str(output)}, default=str)
    command = [sys.executable, str(JOBS), job, given]
    environment = {**os.environ, "LLM_COMPRESSOR_LOG_DISABLED": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{done.stderr}\n{job} failed: {settings}")
    shutil.rmtree(output)
    os.sync()  # what is not on the disk yet would be written during the next run
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


# Sections


def fastest(options: argparse.Namespace, case: Case, layers: int, library: str) -> Row:
    """Return the fastest run of a library, and the most memory that one took; it is run once."""
    key = (case, layers, library)
    if key not in options.known:
        model, runs = model_of(options, layers), list[Row]()
        for _ in range(1 if options.quick else ROUNDS):
            if library == OURS or sum(run["seconds"] for run in runs) < PEER_SECONDS:
                given = {"library": library, "recipe": case.recipe, "model": model}
                runs.append(run_apart(options, "quantize", **given))
        least = min(runs, key=lambda run: run["seconds"])
        options.known[key] = {**least, "peak": max(run["peak"] for run in runs)}
    found: Row = options.known[key]
    return found


def of_peer(options: argparse.Namespace, case: Case) -> Row:
    """Return the run of the peer; where it works on fewer layers, what it would take for all.

    What a search takes beyond min-max grows with the number of weights that are quantized. Min-max
    itself, in which reading and writing count, always runs on the whole model.
    """
    fewer, plain = options.peer_layers, Case(case.scheme, PLAINEST.observer)
    if fewer is None or case.observer == plain.observer:
        return {**fastest(options, case, options.layers, PEER), "is": "whole"}
    ratio = quantized_weights(options.layers) / quantized_weights(fewer)
    whole, less, search = (
        fastest(options, each, layers, PEER)
        for each, layers in ((plain, options.layers), (plain, fewer), (case, fewer))
    )
    times = {
        key: whole[key] + ratio * (search[key] - less[key])
        for key in ("seconds", "processor_seconds")
    }
    return {**times, "is": f"scaled from {fewer}"}


def measure_speed(options: argparse.Namespace) -> Iterator[Row]:
    """Compare the libraries, scheme by scheme."""
    for case in CASES:
        mine, peer = fastest(options, case, options.layers, OURS), of_peer(options, case)
        yield {
            **sizes(options),
            "scheme": case.scheme,
            "observer": case.observer,
            "ours_seconds": mine["seconds"],
            "ours_processor_seconds": mine["processor_seconds"],
            "ours_peak": mine["peak"],
            "peer_seconds": peer["seconds"],
            "peer_is": peer["is"],
            "peer_processor_seconds": peer["processor_seconds"],
            "peer_peak": peer.get("peak"),
            "times_faster": peer["seconds"] / mine["seconds"],
            "goal": case.goal,
            "reached": peer["seconds"] >= case.goal * mine["seconds"],
        }


def sizes(options: argparse.Namespace) -> Row:
    """Say how large the model is."""
    return {"layers": options.layers, "weights": quantized_weights(options.layers) / 1e9}


def measure_copy(options: argparse.Namespace) -> Iterator[Row]:
    """Compare quantizing files with copying them."""
    model = model_of(options, options.layers)
    copies = [copy_files(model, options.place / "copy") for _ in range(ROUNDS)]
    mine = fastest(options, PLAINEST, options.layers, OURS)
    share = min(copies) / mine["seconds"]
    yield {
        "bytes": sum(file.stat().st_size for file in model.iterdir()) / 1e9,
        "scheme": PLAINEST.scheme,
        "observer": PLAINEST.observer,
        "copy_seconds": min(copies),
        "slowest_copy_seconds": max(copies),
        "ours_seconds": mine["seconds"],
        "ours_processor_seconds": mine["processor_seconds"],
        "share": share,
        "goal": LEAST_OF_COPY,
        "reached": share >= LEAST_OF_COPY,
    }


def copy_files(source: Path, goal: Path) -> float:
    """Copy a folder, and return the seconds until all is on the disk."""
    started = time.perf_counter()
    shutil.copytree(source, goal)
    for file in goal.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(goal)
    os.sync()
    return seconds


def measure_memory(options: argparse.Namespace) -> Iterator[Row]:
    """Compare the peaks of a model and of one that is twice as deep."""
    first = 0
    for layers in (options.layers, 2 * options.layers):
        found = fastest(options, PLAINEST, layers, OURS)
        first = first or found["peak"]
        growth = found["peak"] / first - 1
        yield {
            "layers": layers,
            "seconds": found["seconds"],
            "peak": found["peak"],
            "growth": growth,
            "reached": found["peak"] < MOST_MEMORY and abs(growth) <= MOST_GROWTH,
        }


def measure_schemes(options: argparse.Namespace) -> Iterator[Row]:
    """Compare ten checkpoints of ours, and the measurement before them, with one of the peer."""
    if not has_stories():
        return
    rounds = range(1 if options.quick else ROUNDS)
    static = recipe(quantized("FP8", inputs={"observer": "static_minmax"}))
    peers = [run_apart(options, "calibrate", recipe=static)["seconds"] for _ in rounds]
    runs = [run_apart(options, "schemes") for _ in rounds]
    best = {name: min(run[name]["seconds"] for run in runs) for name in runs[0]}
    for name, seconds in best.items():
        yield {"what": name, "seconds": seconds, "stories": STORIES}
    schemes = sum(best[name] for name in SCHEMES)
    yield {"what": "all ten", "seconds": schemes, "reached": schemes < min(peers)}
    yield {"what": "measuring and all ten", "seconds": schemes + best["measuring"]}
    yield {"what": "the peer, FP8 static once", "seconds": min(peers)}


def has_stories() -> bool:
    """Whether stories15M is there; says so if not."""
    try:
        return stories_folder().is_dir()
    except SystemExit as problem:
        print(f"{problem} The section is left out.")
        return False


# How they are shown


def long(value: float) -> str:
    """Write seconds."""
    return f"{number(value)} s"


def in_mib(value: float) -> str:
    """Write bytes."""
    return f"{value / (1 << 20):,.0f} MiB"


def percent(value: float) -> str:
    """Write a change."""
    return f"{value:+.0%}"


OURS_SECONDS = Column("ours", "ours_seconds", long)
OURS_PROCESSOR = Column("cpu", "ours_processor_seconds", long, "the processor time of the run.")
GOAL, REACHED = Column("goal", "goal", at_least), Column("", "reached", mark)
SECTIONS = {
    "speed": Section(
        measure_speed,
        "From files to files, {layers} layers, {weights:.2f} billion weights quantized; page cache "
        "warm",
        (
            Column("scheme", "scheme"),
            Column("observer", "observer"),
            OURS_SECONDS,
            OURS_PROCESSOR,
            Column("peak", "ours_peak", in_mib, "of resident memory."),
            Column("peer", "peer_seconds", long, "does not wait until all is on the disk."),
            Column(
                "layers", "peer_is", str, "scaled: measured on fewer, times the number of weights."
            ),
            Column("cpu", "peer_processor_seconds", long),
            Column("peak", "peer_peak", in_mib),
            Column("faster", "times_faster", number, "peer ÷ ours."),
            GOAL,
            REACHED,
        ),
    ),
    "copy": Section(
        measure_copy,
        "Beside a copy of the files, {bytes:.2f} GB, with fsync; page cache warm",
        (
            Column("scheme", "scheme"),
            Column("observer", "observer"),
            Column("copy", "copy_seconds", long, "the fastest of several."),
            Column("slowest", "slowest_copy_seconds", long),
            OURS_SECONDS,
            OURS_PROCESSOR,
            Column("share", "share", number, "copy ÷ ours."),
            GOAL,
            REACHED,
        ),
    ),
    "memory": Section(
        measure_memory,
        f"Peak of resident memory, W4A16 min-max: goal below {MOST_MEMORY / GIB} GiB, and within "
        f"{MOST_GROWTH:.0%} of each other",
        (
            Column("layers", "layers", str),
            Column("peak", "peak", in_mib),
            Column("growth", "growth", percent),
            Column("ours", "seconds", long),
            REACHED,
        ),
    ),
    "schemes": Section(
        measure_schemes,
        f"stories15M, {{stories}} stories, groups of {GROUP}: ten schemes from one measurement",
        (Column("what", "what"), Column("seconds", "seconds", long), REACHED),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
