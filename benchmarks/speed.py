"""How fast the observers are, beside those of llm-compressor and beside what the machine allows.

Ours, the peer and the limit take turns in one process; of each the fastest call counts. Observers
are built before the clock starts. Other programs that run meanwhile slow the peer the most, since
it waits for its threads thousands of times: how much they used is shown below each table.
There are two limits:

- One memory pass: the fastest of three plain reductions of the same bytes by torch (the largest
  int32, the sum of float32, the sum of int64).
- The arithmetic of a search: values × candidates × operations, at the rate of fused multiply-adds
  that torch reaches in a float32 matrix product (2048³ of them). Operations per value and
  candidate: to the code and back 4 (scale and round, clamp, undo the rounding, subtract from the
  value), 3 more for float codes; the error to the power 2: 1, 3: 3, any other: 11 (floor of its
  size, exponent, mantissa, table, polynomial of degree 6, into the sum); a weight 1. All candidates
  count: where patience leaves out some, or hopeless ones are left before their end, the time can
  be below this limit.

    python benchmarks/speed.py --size 4096 --threads 2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from agreement import DTYPES, FORMATS  # says what to do if the peer is not installed
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.observers import Observer as Peer
from racing import Prepare, calling, race, seconds_of_others, with_threads
from rich.console import Console
from tables import (
    Column,
    Measured,
    Row,
    Section,
    at_least,
    at_most,
    mark,
    milliseconds,
    nanoseconds,
    number,
    plain,
    show,
)
from torch import Tensor

from calipers import Observer
from calipers.kernels import describe
from calipers.kernels.counts import count_values
from calipers.kernels.extrema import extrema
from calipers.kernels.moments import sum_of_squares
from calipers.numerics.layout import Layout

CALLS = 3  # of ours in each round
PRODUCT = 2048  # rows and columns of the matrix product
WIDTH = 124
RESULTS = Path(__file__).parent / "results" / "speed.json"
PASSES: tuple[tuple[torch.dtype, Callable[[Tensor], Tensor]], ...] = (
    (torch.int32, torch.amax),
    (torch.float32, torch.sum),
    (torch.int64, torch.sum),
)


class Case(NamedTuple):
    """An observer in a format, and how many times faster than the peer it is to be, by dtype."""

    observer: str
    format: str
    options: Mapping[str, Any] = {}
    floors: Mapping[str, float] = {}

    def build(self, library: Any) -> Any:
        """Build the observer of ours or of the peer, which changes its arguments."""
        args = QuantizationArgs(**FORMATS[self.format])
        options = {"base_name": "weight", "args": args, **self.options}
        return library.load_from_registry(self.observer, **options)


STRATEGIES = {
    "tensor": Case("memoryless_minmax", "fp8 tensor"),
    "channel": Case("memoryless_minmax", "int8 channel"),
    "group 128": Case("memoryless_minmax", "int4 group 128"),
    "tensor_group 16": Case("memoryless_minmax", "NVFP4"),
    "block 128x128": Case("memoryless_minmax", "fp8 block 128x128"),
}
SEARCHES = (
    *(
        Case("memoryless_mse", fmt, {"norm": norm}, floors)
        for norm, floors in ((2.4, {"fp32": 60, "bf16": 20}), (2.0, {"fp32": 150}))
        for fmt in ("int4 group 128", "int8 channel", "fp8 channel")
    ),
    Case("imatrix_mse", "int4 group 128", floors={"fp32": 60}),
    Case("memoryless_mse", "NVFP4", floors={"fp32": 150}),
    Case("nvfp4_expanded_mse", "NVFP4", floors={"fp32": 150}),
)
OPTIMA = {
    ("int4 group 128", "memoryless_mse"): 10.0,
    ("int8 channel", "memoryless_mse"): None,
    ("fp8 channel", "memoryless_mse"): None,
    ("NVFP4", "nvfp4_expanded_mse"): 200.0,
}
"""Format and observer of the peer: how many times faster the optimum is to be found."""
GROWING = (STRATEGIES["group 128"], SEARCHES[0])
THREADED = (*GROWING, SEARCHES[2])
EXTREMA_FLOOR = 1.5
SUM_FLOORS = {"bf16": 2.0}
COUNT_FLOORS = {"bf16": 6.0}


def main() -> int:
    """Measure every section, print it as soon as it is done, and save all of them."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    console = Console(width=WIDTH, highlight=False)
    facts = machine_facts()
    console.print("\n".join(f"{name.replace('_', ' ')}: {fact}" for name, fact in facts.items()))
    console.print("Floors are set for size 4096 and 2 threads.\n")
    measured: dict[str, Measured] = {}
    for name in [options.only] if options.only else SECTIONS:
        measured[name] = measure(SECTIONS[name], options)
        show(console, SECTIONS[name], measured[name])
    if not options.only:
        sections = {name: found._asdict() for name, found in measured.items()}
        results = {"machine": facts, "size": options.size, "results": sections}
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time against the peer and against the limits.")
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of Calipers")
    parser.add_argument("--quick", action="store_true", help="run the peer once, or not if slow")
    parser.add_argument("--only", choices=SECTIONS, help="run this section, and save nothing")
    return parser.parse_args()


def machine_facts() -> dict[str, Any]:
    """Say what this ran on."""
    kernels = describe()
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": kernels.threads,
        "instruction_set": kernels.instruction_set or "none: kernels in torch",
        **{name: version(name) for name in ("torch", "calipers", "llmcompressor")},
    }


def cpu_model() -> str:
    """Return the name of the processor, where Linux tells it."""
    source = Path("/proc/cpuinfo")
    lines = source.read_text().splitlines() if source.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


# Sections


def measure(section: Section, options: argparse.Namespace) -> Measured:
    """Measure a section, and what other programs used of the machine meanwhile."""
    started, used = time.perf_counter(), seconds_of_others()
    rows = list(section.measure(options))
    used = max(0.0, seconds_of_others() - used)  # ticks are coarse: a little may be missing
    return Measured(rows, used / (time.perf_counter() - started))


def observing(library: Any, case: Case, weight: Tensor) -> Prepare:
    """Observe a weight with a new observer, which has gathered importance if it uses any."""

    def prepare() -> Callable[[], object]:
        observer = case.build(library)
        if case.observer in ("imatrix_mse", "optimal"):
            gather_importance(observer, weight.shape[-1])
        return partial(observer, weight)

    return prepare


def gather_importance(observer: Any, channels: int) -> None:
    """Let a few inputs pass by."""
    linear = torch.nn.Linear(channels, 1)
    observer.attach(linear)
    linear(torch.randn(16, channels, generator=torch.Generator().manual_seed(0)))
    observer.detach(linear)


def passes(values: Tensor) -> list[Prepare]:
    """Read all of the memory once, in several ways."""
    flat = values.view(-1)
    return [calling(reduce, flat.view(dtype)) for dtype, reduce in PASSES]


def draw(size: int, dtype: str) -> Tensor:
    """Draw a square matrix like a weight."""
    torch.manual_seed(0)
    return (torch.randn(size, size) * 0.02).to(DTYPES[dtype])


def measure_extrema(options: argparse.Namespace) -> Iterator[Row]:
    """Time min-max of every strategy."""
    for dtype in ("fp32", "bf16"):
        weight = draw(options.size, dtype)
        for strategy, case in STRATEGIES.items():
            pieces = Layout.of("weight", case.build(Observer).args).pieces(weight)
            lanes = {
                "pass": passes(weight),
                "kernel": [calling(extrema, pieces)] * CALLS,
                "ours": [observing(Observer, case, weight)] * CALLS,
                "peer": [observing(Peer, case, weight)],
            }
            found = race(lanes, options.quick)
            yield {
                "observer": case.observer,
                "strategy": strategy,
                "dtype": dtype,
                "size": options.size,
                **in_seconds(found),
                "times_faster": found["peer"] / found["ours"],
                "ours_to_pass": found["ours"] / found["pass"],
                **against_pass(found["kernel"] / found["pass"], EXTREMA_FLOOR),
            }


def measure_searches(options: argparse.Namespace) -> list[Row]:
    """Time the searches, and judge all of them by the fastest matrix product."""
    rows: list[Row] = []
    for dtype in ("fp32", "bf16"):
        weight = draw(options.size, dtype)
        rows += [measure_search(case, dtype, weight, options) for case in SEARCHES]
    rate = PRODUCT**3 / min(row.pop("product_seconds") for row in rows)
    for row in rows:
        work: int = options.size**2 * row["candidates"] * row["operations"]
        row["fmas_per_second"] = rate
        row["limit_seconds"] = work / rate
        row["ours_to_limit"] = row["ours_seconds"] * rate / work
    return rows


def measure_search(case: Case, dtype: str, weight: Tensor, options: argparse.Namespace) -> Row:
    """Time one search beside the peer and a matrix product."""
    search, factor = case.build(Observer).options, draw(PRODUCT, "fp32")
    lanes = {
        "product": [calling(torch.mm, factor, factor)],
        "ours": [observing(Observer, case, weight)] * CALLS,
        "peer": [observing(Peer, case, weight)],
    }
    if options.quick and case.observer == "nvfp4_expanded_mse":
        del lanes["peer"]
    found = race(lanes, options.quick)
    faster = found["peer"] / found["ours"] if "peer" in found else None
    floor = case.floors.get(dtype)
    return {
        "observer": case.observer,
        "format": case.format,
        "norm": search.norm,
        "dtype": dtype,
        "size": options.size,
        "candidates": len(search.factors),
        "operations": operations(case, search.norm),
        **in_seconds(found),
        "times_faster": faster,
        "floor": floor,
        "reached": faster >= floor if faster and floor else None,
    }


def operations(case: Case, norm: float) -> int:
    """Count the arithmetic of one value and candidate, as the head of this file says."""
    code = 7 if FORMATS[case.format].get("type") == "float" else 4
    return code + {2.0: 1, 3.0: 3}.get(norm, 11) + (case.observer == "imatrix_mse")


def measure_optima(options: argparse.Namespace) -> Iterator[Row]:
    """Time the search of all storable scales beside a search of the peer."""
    weight = draw(options.size, "bf16")
    for (fmt, peer), floor in OPTIMA.items():
        theirs = {"peer": [observing(Peer, Case(peer, fmt), weight)]}
        for importance in ("none", "imatrix", "hessian"):
            case = Case("optimal", fmt, {"importance": importance})
            lanes = {**theirs, "ours": [observing(Observer, case, weight)]}
            if options.quick and peer == "nvfp4_expanded_mse":
                del lanes["peer"]
            found = race(lanes, options.quick)
            faster = found["peer"] / found["ours"] if "peer" in found else None
            yield {
                "importance": importance,
                "format": fmt,
                "dtype": "bf16",
                "size": options.size,
                "peer": peer,
                **in_seconds(found),
                "times_faster": faster,
                "floor": floor,
                "reached": faster >= floor if faster and floor else None,
            }


def measure_statistics(options: argparse.Namespace) -> Iterator[Row]:
    """Time what is gathered of activations."""
    layout = Layout.of("input", QuantizationArgs(num_bits=8, strategy="tensor"))
    for dtype in DTYPES:
        tokens = draw(options.size, dtype)
        for kernel, values, floors in (
            (sum_of_squares, tokens, SUM_FLOORS),
            (count_values, layout.pieces(tokens), COUNT_FLOORS),
        ):
            found = race({"pass": passes(tokens), "ours": [calling(kernel, values)] * CALLS})
            yield {
                "kernel": kernel.__name__,
                "dtype": dtype,
                "size": options.size,
                **in_seconds(found),
                **against_pass(found["ours"] / found["pass"], floors.get(dtype)),
            }


def measure_growth(options: argparse.Namespace) -> Iterator[Row]:
    """Time ever larger weights."""
    sizes = [options.size // 4, options.size // 2, options.size, options.size * 2]
    weights = {str(size): draw(size, "fp32") for size in sizes}
    for name, calls in subjects(GROWING).items():
        found = race({size: calls(weight) for size, weight in weights.items()})
        per_value = {size: found[size] / weights[size].numel() for size in found}
        for size in found:
            yield {
                "subject": name,
                "dtype": "fp32",
                "size": int(size),
                "seconds": found[size],
                "seconds_per_value": per_value[size],
                "to_smallest": per_value[size] / per_value[str(sizes[0])],
            }


def measure_threads(options: argparse.Namespace) -> Iterator[Row]:
    """Time one thread, and all of them."""
    weight = draw(options.size, "fp32")
    for name, calls in subjects(THREADED).items():
        lanes = {
            lane: [with_threads(count, prepare) for prepare in calls(weight)]
            for lane, count in (("one_thread", 1), ("all_threads", options.threads))
        }
        found = race(lanes)
        yield {
            "subject": name,
            "dtype": "fp32",
            "size": options.size,
            "threads": options.threads,
            **in_seconds(found),
            "times_faster": found["one_thread"] / found["all_threads"],
        }


def subjects(cases: tuple[Case, ...]) -> dict[str, Callable[[Tensor], list[Prepare]]]:
    """Return what is timed on several sizes or threads: our observers, and a pass to compare."""

    def ours(case: Case, weight: Tensor) -> list[Prepare]:
        return [observing(Observer, case, weight)] * CALLS

    observers = {f"{case.observer} {case.format}": partial(ours, case) for case in cases}
    return {**observers, "one memory pass": passes}


def in_seconds(found: Mapping[str, float]) -> Row:
    """Name times by their unit."""
    return {f"{name}_seconds": value for name, value in found.items()}


def against_pass(ratio: float, floor: float | None) -> Row:
    """Judge a number of memory passes."""
    return {"to_pass": ratio, "floor": floor, "reached": ratio <= floor if floor else None}


# Output

DTYPE = Column("dtype", "dtype")
OURS = Column("ours", "ours_seconds", milliseconds, "fastest call of our observer or kernel.")
PEER = Column("peer", "peer_seconds", milliseconds, "fastest call of llm-compressor's observer.")
FASTER = Column("faster", "times_faster", number, "peer ÷ ours.")
PASS = Column(
    "pass",
    "pass_seconds",
    milliseconds,
    "one pass over the same bytes by torch: the largest int32, the sum of float32 or of int64.",
)
REACHED = Column("", "reached", mark)
SECTIONS = {
    "min-max": Section(
        measure_extrema,
        "Min-max: memoryless_minmax of a {size} × {size} weight",
        (
            Column("strategy", "strategy"),
            DTYPE,
            OURS,
            PEER,
            FASTER,
            PASS,
            Column("ours ÷ pass", "ours_to_pass", number, "the whole observer in memory passes."),
            Column("kernel", "kernel_seconds", milliseconds, "the extrema alone."),
            Column("kernel ÷ pass", "to_pass", number, "the kernel in memory passes."),
            Column("floor", "floor", at_most, "what kernel ÷ pass should reach."),
            REACHED,
        ),
    ),
    "searches": Section(
        measure_searches,
        "Searches on a {size} × {size} weight; "
        "torch.mm reaches {fmas_per_second:.3g} fused multiply-adds per second",
        (
            Column("observer", "observer"),
            Column("format", "format"),
            Column("norm", "norm", plain, "exponent of the error."),
            DTYPE,
            OURS,
            PEER,
            FASTER,
            Column("tried", "candidates", plain, "candidates per piece, if patience lasts."),
            Column(
                "ops",
                "operations",
                plain,
                "operations per value and candidate: integer codes 4, float codes 7; "
                "norm 2 +1, 3 +3, others +11; importance +1.",
            ),
            Column(
                "limit", "limit_seconds", milliseconds, "values × tried × ops at the rate above."
            ),
            Column("÷ limit", "ours_to_limit", number, "ours ÷ limit."),
            Column("floor", "floor", at_least, "what faster should reach."),
            REACHED,
        ),
    ),
    "optima": Section(
        measure_optima,
        "The best of all storable scales (optimal) of a {size} × {size} weight",
        (
            Column("format", "format"),
            Column("importance", "importance"),
            DTYPE,
            OURS,
            Column("peer's", "peer"),
            PEER,
            FASTER,
            Column("floor", "floor", at_least, "what faster should reach."),
            REACHED,
        ),
    ),
    "sums-and-counts": Section(
        measure_statistics,
        "Sums and counts of {size} tokens × {size} channels",
        (
            Column("kernel", "kernel"),
            DTYPE,
            OURS,
            PASS,
            Column("ours ÷ pass", "to_pass", number, "the kernel in memory passes."),
            Column("floor", "floor", at_most, "what ours ÷ pass should reach."),
            REACHED,
        ),
    ),
    "growth": Section(
        measure_growth,
        "Growth with the size of a weight, from {size} × {size}",
        (
            Column("what", "subject"),
            DTYPE,
            Column("size", "size", plain, "rows and columns."),
            Column("time", "seconds", milliseconds, "fastest call."),
            Column("per value", "seconds_per_value", nanoseconds, "time ÷ number of values."),
            Column("÷ smallest", "to_smallest", number, "per value ÷ that of the smallest size."),
        ),
    ),
    "threads": Section(
        measure_threads,
        "From 1 thread to {threads} on a {size} × {size} weight",
        (
            Column("what", "subject"),
            DTYPE,
            Column("one", "one_thread_seconds", milliseconds, "fastest call with one thread."),
            Column("all", "all_threads_seconds", milliseconds, "fastest call with all threads."),
            Column("faster", "times_faster", number, "one ÷ all."),
        ),
    ),
}


if __name__ == "__main__":
    sys.exit(main())
