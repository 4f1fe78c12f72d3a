"""How much memory the commands take that make or read a file of measurements with Hessians.

A random Llama of the shape of SmolLM2-135M (269 MB in bfloat16, whose Hessians are 810 MB) is
written and measured; then it is quantized, advised on and reported from the file. Every command is
a process of its own, whose ``/proc/PID/status`` is looked at again and again: the peak of resident
memory, and that of its anonymous part, which leaves out mapped files that the system can drop. The
first row is what a process takes that has read the model's config and nothing else.

    python benchmarks/statistics_memory.py --samples 8 --tokens 256
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

RESULTS = Path(__file__).parent / "results" / "statistics_memory.json"
CALIPERS = Path(sys.executable).with_name("calipers")
EVERY = 0.01  # seconds between two looks
COLLECTED = "hessian,sensitivity,attention"
GROUP = 64  # divides 576, which 128 does not


def main() -> int:
    """Measure all commands, print and save the results."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="calipers-", dir=options.place) as folder:
        place = Path(folder)
        write_model(place / "model", options.layers)
        write_data(place / "data.jsonl", options.samples, options.tokens)
        rows = [
            {"command": name, **watched(arguments, place)}
            for name, arguments in commands(options).items()
        ]
        sizes = {name: (place / name).stat().st_size for name in ("seen", "seen-all")}
    Console().print(table(rows, sizes))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    given = {"layers": options.layers, "samples": options.samples, "tokens": options.tokens}
    RESULTS.write_text(json.dumps({**given, "sizes": sizes, "results": rows}, indent=2) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Peak memory of commands with measurements.")
    parser.add_argument("--layers", type=int, default=30, help="of the model")
    parser.add_argument("--samples", type=int, default=8, help="that are measured")
    parser.add_argument("--tokens", type=int, default=256, help="of each sample")
    parser.add_argument("--place", type=Path, help="a folder with room for 3 GB")
    return parser.parse_args()


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return what runs, in its order."""
    data = ["--data", "data.jsonl", "--samples", str(options.samples)]
    scheme, read = ["--scheme", "W4A16", "--group-size", str(GROUP)], ["--measurements", "seen-all"]
    gptq = ["quantize", "model", *scheme, "--method", "gptq", *read, "-o", "gptq"]
    advised = f"W4A16-g{GROUP},UNQUANTIZED"
    return {
        "plan": ["plan", "model", *scheme],
        "measure": ["measure", "model", *data, "-o", "seen"],
        f"measure --collect {COLLECTED}": [
            *("measure", "model", *data, "--collect", COLLECTED, "-o", "seen-all")
        ],
        "quantize, no data": ["quantize", "model", *scheme, "-o", "rtn"],
        "quantize --method gptq --measurements": gptq,
        "advise": ["advise", "model", *read, "--schemes", advised, "--budget", "8bpw"],
        "report": ["report", "gptq", *read, "--source", "model", "-o", "report.html"],
    }


def write_model(folder: Path, layers: int) -> None:
    """Write a random model as wide as SmolLM2-135M."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    build: Any = LlamaForCausalLM
    build(config).to(torch.bfloat16).save_pretrained(folder)


def write_data(file: Path, samples: int, tokens: int) -> None:
    """Write random tokens."""
    ids = torch.randint(49152, (samples, tokens), generator=torch.Generator().manual_seed(0))
    file.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in ids.tolist()))


def watched(arguments: list[str], place: Path) -> dict[str, Any]:
    """Run a command in a folder, and return its seconds and its peaks in bytes."""
    started, peaks = time.perf_counter(), {"VmHWM": 0, "RssAnon": 0}
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(
            [str(CALIPERS), *arguments], cwd=place, stdout=told, stderr=subprocess.STDOUT
        )
        while process.poll() is None:
            for name, size in sizes_of(process.pid).items():
                peaks[name] = max(peaks[name], size)
            time.sleep(EVERY)
        if process.returncode:
            told.seek(0)
            sys.exit(f"{' '.join(arguments)} failed:\n{told.read()}")
    seconds = round(time.perf_counter() - started, 1)
    return {"peak": peaks["VmHWM"], "anonymous": peaks["RssAnon"], "seconds": seconds}


def sizes_of(process: int) -> dict[str, int]:
    """Return the resident memory of a process: the peak so far, and what is anonymous now."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return {}
    parts = (line.split() for line in lines if line.startswith(("VmHWM:", "RssAnon:")))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in parts}


def table(rows: list[dict[str, Any]], sizes: dict[str, int]) -> Table:
    """Lay out the results."""
    files = ", ".join(f"{name}: {size / 1e6:,.0f} MB" for name, size in sizes.items())
    result = Table(title=f"Peaks of resident memory ({files})", title_justify="left")
    result.add_column("command")
    for column in ("peak, MiB", "anonymous, MiB", "seconds"):
        result.add_column(column, justify="right")
    for row in rows:
        peaks = (f"{row[key] / (1 << 20):,.0f}" for key in ("peak", "anonymous"))
        result.add_row(row["command"], *peaks, f"{row['seconds']:.1f}")
    return result


if __name__ == "__main__":
    sys.exit(main())
