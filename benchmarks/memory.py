"""How much memory the search takes beyond the weight it searches, and how much a whole model takes.

Every strategy runs in a process of its own, because a peak cannot be taken back. What counts is
the peak of resident memory minus what was resident when the weight stood ready. The number of
candidates does not matter for memory; few of them keep the run short. The second table is that of
``layerwise.py``: a model of 24 layers, quantized layer by layer and as a whole.

    python benchmarks/memory.py --size 16384 --candidates 2
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import layerwise
import torch
from compressed_tensors.quantization import QuantizationArgs
from rich.console import Console
from rich.table import Table
from torch import Tensor

from calipers import Observer

LIMIT = 1 << 30
RESULTS = Path(__file__).parent / "results" / "memory.json"
SCHEMES: dict[str, dict[str, Any]] = {
    "int4 group 128": {"num_bits": 4, "strategy": "group", "group_size": 128},
    "int8 channel": {"num_bits": 8, "strategy": "channel"},
    "fp8 tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 block 128x128": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
    },
    "NVFP4 group 16": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": torch.float8_e4m3fn,
    },
}


def main() -> int:
    """Measure, print and save the results; return 1 if something needs more than its limit."""
    options = parse_arguments()
    if options.scheme:
        print(json.dumps(measure(options.scheme, options.size, options.candidates)))
        return 0
    results = [measure_apart(name, options.size, options.candidates) for name in SCHEMES]
    Console().print(table(results, options.size))
    pipelines = layerwise.measure_all(layers=24, hidden=1024)
    Console().print(layerwise.table(pipelines))
    summary = {"size": options.size, "limit": LIMIT, "results": results, "pipelines": pipelines}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(summary, indent=2) + "\n")
    failed = any(result["bytes_beyond_weight"] > LIMIT for result in results)
    return int(failed or layerwise.exceeded(pipelines))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Peak memory of the search beyond the weight.")
    parser.add_argument("--size", type=int, default=16384, help="rows and columns of the weight")
    parser.add_argument("--candidates", type=int, default=2, help="ranges that the search tries")
    parser.add_argument("--scheme", choices=SCHEMES, help="measure only this one, in this process")
    return parser.parse_args()


def measure_apart(scheme: str, size: int, candidates: int) -> dict[str, Any]:
    """Measure one scheme in a fresh process."""
    settings = {"--scheme": scheme, "--size": str(size), "--candidates": str(candidates)}
    command = [sys.executable, __file__, *(word for pair in settings.items() for word in pair)]
    # Threads that wait without spinning: other programs on the machine cost little time.
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    finished = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def measure(scheme: str, size: int, candidates: int) -> dict[str, Any]:
    """Observe one large weight, and return how far memory rose above the state before."""
    args = QuantizationArgs(**SCHEMES[scheme])
    weight = large_weight(size)
    observe(weight[:256, :256], args, candidates)
    before = resident_bytes()
    started = time.perf_counter()
    observe(weight, args, candidates)
    seconds = time.perf_counter() - started
    return {
        "scheme": scheme,
        "weight_bytes": weight.nbytes,
        "bytes_beyond_weight": max(0, peak_bytes() - before),
        "seconds": round(seconds, 2),
    }


def observe(weight: Tensor, args: QuantizationArgs, candidates: int) -> None:
    """Search with the default options, except for the number of candidates, and use the result."""
    maxshrink = (candidates + 0.5) / 100  # the observer cuts 100 × maxshrink to a whole number
    observer = Observer.load_from_registry("memoryless_mse", args=args, maxshrink=maxshrink)
    observer(weight).get_qparams()


def large_weight(size: int) -> Tensor:
    """Fill a bf16 matrix by repeating a few rows, so that making it has no peak of its own."""
    rows = torch.randn(64, size).to(torch.bfloat16)
    weight = torch.empty(size, size, dtype=torch.bfloat16)
    for start in range(0, size, len(rows)):
        part = weight[start : start + len(rows)]
        part.copy_(rows[: len(part)])
    return weight


def resident_bytes() -> int:
    """Return the memory that is resident now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """Return the most memory that was ever resident."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes * 1024


def table(results: list[dict[str, Any]], size: int) -> Table:
    """Lay out the results."""
    title = f"Peak memory beyond a {size:,} × {size:,} bf16 weight"
    result = Table(title=title, title_justify="left")
    result.add_column("scheme")
    for column in ("bytes", "MiB", "of the limit (1 GiB)", "seconds"):
        result.add_column(column, justify="right")
    for row in results:
        used = row["bytes_beyond_weight"]
        cells = f"{used:,}", f"{used / 2**20:,.0f}", f"{used / LIMIT:.2f}", f"{row['seconds']:.1f}"
        result.add_row(row["scheme"], *cells, style="bold red" if used > LIMIT else "")
    return result


if __name__ == "__main__":
    sys.exit(main())
