"""How large the page of ``calipers report`` is, and how long a browser takes to open it.

A random Llama of 32 narrow layers is written, measured on random tokens, and quantized in two ways.
Its page is opened in a headless Chromium, a few times; the fastest counts. It is open when the map
of all modules and the bars of the worst ones are drawn, which a reader sees first.

    pip install playwright    # and a chromium on the path; `make test-report` installs both
    python benchmarks/report.py
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from one_table import measure_and_print
from playwright.sync_api import sync_playwright
from tables import Column, Row, number
from transformers import AutoModelForCausalLM, LlamaConfig

import calipers

SCHEMES = ("W4A16", "W8A8_STATIC")
SAMPLES, LENGTH = 32, 128
SIZE_LIMIT, TIME_LIMIT = 15.0, 2.0
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
COLUMNS = (
    Column("layers", "layers"),
    Column("page (MB)", "size", number),
    Column("≤", "size_limit", number),
    Column("loaded (s)", "loaded", number),
    Column("drawn (s)", "drawn", number),
    Column("≤", "time_limit", number),
    Column("written in (s)", "written", number),
)


def main() -> None:
    """Measure the page, and print it."""
    options = parse_arguments()
    warnings.simplefilter("ignore")
    if not options.chromium:
        sys.exit("There is no Chromium: install one, or give its path with --chromium.")
    measure_and_print(COLUMNS, lambda: [measure(options)], options.threads)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time the page of a report in a browser.")
    parser.add_argument("--layers", type=int, default=32, help="of the model")
    parser.add_argument("--width", type=int, default=512, help="of the hidden states")
    parser.add_argument("--rounds", type=int, default=5, help="how often the page is opened")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="path of the browser")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch and of Calipers")
    parser.add_argument("--output", type=Path, help="where the page is kept")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> Row:
    """Write a page, and open it."""
    with tempfile.TemporaryDirectory() as place:
        page = Path(place) / "report.html"
        written = write_page(page, options.layers, options.width)
        times = open_page(page, options.chromium, options.rounds)
        if options.output is not None:
            shutil.copy(page, options.output)
        size = page.stat().st_size / 1e6
    return {
        "layers": options.layers,
        "size": size,
        "size_limit": SIZE_LIMIT,
        **times,
        "time_limit": TIME_LIMIT,
        "written": written,
        "reached": size < SIZE_LIMIT and times["drawn"] < TIME_LIMIT,
    }


def write_page(page: Path, layers: int, width: int) -> float:
    """Make a model and its checkpoints, and return how long it takes to write their page."""
    folder = page.parent
    write_model(folder / "model", layers, width)
    ids = torch.randint(1000, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    seen = calipers.measure(
        folder / "model", ids, collect="outputs", num_samples=SAMPLES, progress=False
    )
    for scheme in SCHEMES:
        calipers.quantize(folder / "model", scheme, seen, folder / scheme, progress=False)
    started = time.perf_counter()
    folders = [folder / scheme for scheme in SCHEMES]
    calipers.report(folders, seen, page, source=folder / "model")
    return time.perf_counter() - started


def write_model(folder: Path, layers: int, width: int) -> None:
    """Write a random Llama, as deep as a large one and narrow."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        dtype=torch.bfloat16,
    )
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)


def open_page(page: Path, chromium: str, rounds: int) -> dict[str, float]:
    """Open a page in a new tab each time; return the fastest times in seconds."""
    times: dict[str, list[float]] = {"loaded": [], "drawn": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        for _ in range(rounds):
            tab = browser.new_page(viewport={"width": 1400, "height": 900})
            started = time.perf_counter()
            tab.goto(page.as_uri(), wait_until="load")
            times["loaded"].append(time.perf_counter() - started)
            for plot in ("heat", "worst"):
                tab.wait_for_selector(f"#{plot} .main-svg")
            times["drawn"].append(time.perf_counter() - started)
            tab.close()
        browser.close()
    return {name: min(found) for name, found in times.items()}


if __name__ == "__main__":
    main()
