"""Perplexity of stories15M quantized by each observer of Calipers and of llm-compressor.

Same schemes, same stories, same run. Observers see the weights as the checkpoint has them, in
bfloat16, so that scales are stored in bfloat16. The quantized model runs in float32, with every
Linear of the decoder replaced by what its scales make of it; ``lm_head`` stays as it is. Stories
run one at a time. Importance comes from the calibration stories; static activations are observed
on some of them, in bfloat16, and each of their observers is tried with several of the weights on
some of the evaluation stories, for there are many pairs. What quantizes to the same is judged once.

Some sections are of another kind: ``methods``, with ``-half`` of the data and on the ``-demo``
model, what whole methods lose on several texts, ours beside GPTQ and AWQ of llm-compressor and
AutoRound; ``overhead``, what observing adds to a forward pass; and ``checkpoints``, whether a model
is after writing and loading what it was before.

    python benchmarks/accuracy.py --only W4A16-g96 NVFP4A16
    python benchmarks/accuracy.py --only methods --schemes W3A16-g32 --contenders autoround gptq
    python benchmarks/accuracy.py --only methods --quick
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from checkpoints import SECTION as CHECKPOINTS
from checkpoints import measure_checkpoints
from contenders import (  # says what to do if the peer is not installed
    ACTIVATION_CONTENDERS,
    PEER,
    SCHEMES,
    WEIGHT_CONTENDERS,
)
from methods import SECTIONS as METHODS
from methods import measure_methods
from overhead import SECTION as OVERHEAD
from overhead import measure_overhead
from quantized import Bench
from quantizers import KEYS
from rich.console import Console
from stories import load_model, load_stories
from tables import Column, Row, table
from texts import SCHEMES as METHOD_SCHEMES

from calipers import CalipersWarning

QUICK = 20  # stories of each kind
WIDTH_OF_METHODS = 170
RESULTS = Path(__file__).parent / "results" / "accuracy.json"


def main() -> int:
    """Measure every scheme, print it as soon as it is done, and save all of them."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    console = Console(width=124, highlight=False)
    names = [name for name in options.only or SCHEMES if name in SCHEMES]
    results: dict[str, list[Row]] = {}
    if names:
        warnings.simplefilter("ignore", CalipersWarning)  # imatrix_mse falls back, as the peer does
        results = measure_schemes(names, options, console)
    for section in METHODS:
        if not options.only or section in options.only:
            wide = Console(width=WIDTH_OF_METHODS, highlight=False)
            results[section] = measure_methods(wide, section, options)
    if not options.only or OVERHEAD in options.only:
        results[OVERHEAD] = measure_overhead(console, load_model().float(), options.quick)
    if not options.only or CHECKPOINTS in options.only:
        count = options.stories or (QUICK if options.quick else None)
        results[CHECKPOINTS] = measure_checkpoints(console, count)
    if not (options.quick or options.stories):
        save(results)
    return 0


def save(results: dict[str, list[Row]]) -> None:
    """Save what was measured, beside what an earlier run measured of other schemes."""
    facts = {name: version(name) for name in ("torch", "calipers", "llmcompressor")}
    saved = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept = saved.get("results", {}) if facts.items() <= saved.items() else {}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({**facts, "results": {**kept, **results}}, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Perplexity against the peer.")
    known = [*SCHEMES, *METHODS, OVERHEAD, CHECKPOINTS]
    parser.add_argument("--only", nargs="+", choices=known, metavar="SCHEME")
    parser.add_argument("--stories", type=int, help="evaluate on so many stories")
    parser.add_argument(
        "--quick", action="store_true", help="evaluate on a few stories, methods on one scheme"
    )
    parser.add_argument("--threads", type=int, default=2)
    methods = parser.add_argument_group("methods")
    methods.add_argument("--schemes", nargs="+", choices=METHOD_SCHEMES, metavar="SCHEME")
    methods.add_argument(
        "--contenders",
        nargs="+",
        choices=KEYS,
        metavar="NAME",
        help=f"run only these, beside what is known of others: {', '.join(KEYS)}",
    )
    methods.add_argument("--again", action="store_true", help="also run what is known already")
    return parser.parse_args()


def measure_schemes(
    names: list[str], options: argparse.Namespace, console: Console
) -> dict[str, list[Row]]:
    """Calibrate once, then measure one scheme after the other."""
    report_missing(console)
    started = time.perf_counter()
    limit = QUICK if options.quick else None
    calibration = load_stories("calibration", limit)
    bench = Bench(names, calibration, load_stories("evaluation", options.stories or limit))
    console.print(f"Calibrated in {time.perf_counter() - started:.0f} s.\n")
    results = {}
    for name in names:
        started, rows = time.perf_counter(), []
        for row in bench.measure(name):
            rows.append(row)
            console.print(f"  {row['library']} {row['weights']} {row['activations']}", style="dim")
        judge(rows)
        results[name] = rows
        console.print(f"{name}: {bench.describe(name)}", style="bold")
        console.print(table(COLUMNS, rows))
        console.print(f"Took {time.perf_counter() - started:.0f} s.\n")
    return results


def report_missing(console: Console) -> None:
    """Say which contenders are not there."""
    for contender in (*WEIGHT_CONTENDERS, *ACTIVATION_CONTENDERS):
        if not contender.is_registered:
            console.print(f"{contender.library} has no {contender}: skipped.")


def judge(rows: list[Row]) -> None:
    """Compare each increase with the best one of the peer."""
    best = min(row["increase"] for row in rows if row["library"] == PEER)
    for row in rows:
        row["ratio"] = row["increase"] / best if best > 0 else None


COLUMNS = (
    Column("library", "library"),
    Column("weights", "weights"),
    Column("activations", "activations"),
    Column("perplexity", "perplexity", "{:.4f}".format),
    Column("increase", "increase", "{:+.4f}".format),
    Column("÷ peer's best", "ratio", "{:.3f}".format),
)


if __name__ == "__main__":
    sys.exit(main())
