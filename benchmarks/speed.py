"""How fast the observers are, beside those of llm-compressor and beside what the machine allows.

Each instruction set that the machine has (AVX2, AVX-512) is a column of its own. It is measured in
processes of its own, in which torch and its libraries are held to it too, so that the AVX2 column
is what a machine without AVX-512 sees. In such a process ours, the peer and the limit take turns;
of each the fastest call counts. Observers are built before the clock starts. Other programs that
run meanwhile slow the peer the most, since it waits for its threads thousands of times: how much
they used is shown below each table. There are two limits:

- One memory pass: the fastest of three plain reductions of the same bytes by torch (the largest
  int32, the sum of float32, the sum of int64).
- The arithmetic of a search: values × candidates × operations, at the rate of fused multiply-adds
  that torch reaches with the same instruction set in a float32 matrix product (2048³ of them).
  Operations per value and candidate: to the code and back 4 (scale and round, clamp, undo the
  rounding, subtract from the value), 3 more for float codes; the error to the power 2: 1, 3: 3,
  any other: 11 (floor of its size, exponent, mantissa, table, polynomial of degree 6, into the
  sum); a weight 1. All candidates count: where patience leaves out some, or hopeless ones are left
  before their end, the time can be below this limit.

    python benchmarks/speed.py --size 4096 --threads 2
    python benchmarks/speed.py --isa avx2 --only optima --quick
    python benchmarks/speed.py --markdown benchmarks/README.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from speed_tables import SECTIONS, as_markdown, show, write_between
from tables import Measured

from calipers.kernels import describe

WIDTH = 176
JOBS = Path(__file__).with_name("speed_jobs.py")
RESULTS = Path(__file__).parent / "results" / "speed.json"
HELD = {
    "avx2": {
        "CALIPERS_NATIVE": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    "avx512": {
        "CALIPERS_NATIVE": "avx512",
        "ATEN_CPU_CAPABILITY": "avx512",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
        "ONEDNN_MAX_CPU_ISA": "DEFAULT",
    },
}
"""The environment that holds Calipers, and torch with its libraries, to an instruction set."""


def main() -> int:
    """Measure every section, print it as soon as it is done, and save all of them."""
    options = parse_arguments()
    console = Console(width=WIDTH, highlight=False)
    facts = machine_facts(options)
    console.print("\n".join(as_lines(facts)))
    console.print("Goals are set for size 4096 and 2 threads.\n")
    measured: dict[str, dict[str, Measured]] = {}
    for name in [options.only] if options.only else SECTIONS:
        measured[name] = {isa: run_apart(isa, name, options) for isa in options.isa}
        show(console, SECTIONS[name], measured[name])
    if not options.only:
        save(facts, measured)
    if options.markdown:
        tables = [as_markdown(SECTIONS[name], found) for name, found in measured.items()]
        machine = "\n".join(f"- {line}" for line in as_lines(facts))
        write_between(options.markdown, "\n\n".join([machine, *tables]))
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time against the peer and against the limits.")
    here = instruction_sets()
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of Calipers")
    parser.add_argument("--isa", nargs="+", choices=here, default=here, help="instruction sets")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="let the peer run once or for half a second, or not if slow",
    )
    parser.add_argument("--only", choices=SECTIONS, help="run this section, and save nothing")
    parser.add_argument("--markdown", type=Path, help="a file between whose marks tables go")
    options = parser.parse_args()
    if options.markdown and options.only:
        parser.error("--markdown writes all sections: leave out --only")
    return options


def instruction_sets() -> list[str]:
    """Return those that are compared; where the machine has none of them, the best it has."""
    kernels = describe()
    known = [name for name in HELD if name in kernels.instruction_sets]
    return known or [kernels.instruction_set or "torch"]


def machine_facts(options: argparse.Namespace) -> dict[str, Any]:
    """Say what this ran on, and how."""
    versions = {name: version(name) for name in ("torch", "calipers", "llmcompressor")}
    facts = {"date": date.today().isoformat(), "cpu": cpu_model(), "cores": os.cpu_count()}
    given = {"threads": options.threads, "size": options.size, "quick": options.quick}
    return {**facts, **given, "instruction sets": ", ".join(options.isa), **versions}


def cpu_model() -> str:
    """Return the name of the processor, where Linux tells it."""
    source = Path("/proc/cpuinfo")
    lines = source.read_text().splitlines() if source.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown")


def as_lines(facts: dict[str, Any]) -> Iterable[str]:
    """Write facts, one a line."""
    return (f"{name}: {fact}" for name, fact in facts.items())


def run_apart(isa: str, section: str, options: argparse.Namespace) -> Measured:
    """Measure a section in a process that is held to an instruction set."""
    settings = {"size": options.size, "threads": options.threads, "quick": options.quick}
    command = [sys.executable, str(JOBS), section, json.dumps(settings)]
    environment = {**os.environ, **HELD.get(isa, {})}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{section} failed with {isa}")
    found = json.loads(done.stdout.splitlines()[-1])
    if isa in HELD and {found["kernels"], found["torch"].lower()} != {isa}:
        sys.exit(f"{section} ran with {found['kernels']}, torch with {found['torch']}, not {isa}")
    return Measured(found["rows"], found["cores_used_by_others"])


def save(facts: dict[str, Any], measured: dict[str, dict[str, Measured]]) -> None:
    """Keep all figures, by section and instruction set."""
    sections = {
        name: {isa: each._asdict() for isa, each in found.items()}
        for name, found in measured.items()
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": facts, "results": sections}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
