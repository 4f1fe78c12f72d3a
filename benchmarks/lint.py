"""How long ``calipers.lint`` takes, beside reading the same files.

A random Llama is written and quantized, and its checkpoints are read once so that the page cache
is warm. Reading all bytes of the files and linting them take turns in one process, which has
imported everything; of each the fastest round counts. A quotient of 2 means that a disk at half
the speed of memory is what is waited for.

    python benchmarks/lint.py --layers 22 --against
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

from one_table import measure_and_print
from racing import seconds
from random_llama import write_model
from tables import Column, Row, number

import calipers

SCHEMES = ("W4A16", "FP8_DYNAMIC", "NVFP4A16")
ROUNDS = 3
BUFFER = 1 << 24
COLUMNS = (
    Column("checkpoint", "scheme"),
    Column("GB", "size", number),
    Column("read (s)", "read", number),
    Column("lint (s)", "lint", number),
    Column("lint ÷ read", "ratio", number),
    Column("with the original (s)", "against", number),
    Column("findings", "findings"),
)


def main() -> None:
    """Measure every checkpoint, and print it."""
    options = parse_arguments()
    warnings.simplefilter("ignore")
    measure_and_print(COLUMNS, lambda: measure_all(options), options.threads, width=110)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time the linting of checkpoints.")
    parser.add_argument("--layers", type=int, default=22, help="of the model; 22 are a billion")
    parser.add_argument("--source", type=Path, help="a folder with a model, instead of a new one")
    parser.add_argument("--place", type=Path, help="where checkpoints are written meanwhile")
    parser.add_argument("--against", action="store_true", help="measure errors of weights, too")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of Calipers")
    return parser.parse_args()


def measure_all(options: argparse.Namespace) -> list[Row]:
    """Quantize a model in every scheme, and time what looks at the results."""
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        source = options.source or Path(place) / "source"
        if options.source is None:
            write_model(source, options.layers)
        return [measure(scheme, source, Path(place), options.against) for scheme in SCHEMES]


def measure(scheme: str, source: Path, place: Path, against: bool) -> Row:
    """Quantize a model, and time what looks at the result."""
    folder = place / scheme
    calipers.quantize(source, recipe=scheme, output_dir=folder, progress=False)
    size = read(folder)
    found = calipers.lint(folder)
    times = {"read": [seconds(lambda: read(folder))], "lint": [seconds(lambda: lint(folder))]}
    for _ in range(ROUNDS - 1):
        times["read"].append(seconds(lambda: read(folder)))
        times["lint"].append(seconds(lambda: lint(folder)))
    fastest = {name: min(each) for name, each in times.items()}
    return {
        "scheme": scheme,
        "size": size / 1e9,
        **fastest,
        "ratio": fastest["lint"] / fastest["read"],
        "against": seconds(lambda: lint(folder, source)) if against else None,
        "findings": str(len(found.findings)),
    }


def lint(folder: Path, against: Path | None = None) -> None:
    """Look at a checkpoint."""
    calipers.lint(folder, against)


def read(folder: Path) -> int:
    """Read all bytes of the tensors of a folder, and count them."""
    room, total = memoryview(bytearray(BUFFER)), 0
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(room):
                total += count
    return total


if __name__ == "__main__":
    main()
