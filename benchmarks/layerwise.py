"""How much memory quantizing a whole model takes, with the pipelines ``sequential`` and ``basic``.

The model is made on disk, one layer at a time, so that nothing but the run under test ever holds
it. The run is a process of its own; what counts is the peak of resident memory above what was
resident after the same run on a model of one tiny layer. Anonymous memory and pages of files that
are mapped are told apart: the kernel can drop the second kind at any time, we count them all the
same.

    python benchmarks/layerwise.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import calipers

MIB = 1 << 20
ALLOWANCE = 32 * MIB
"""What may come on top of three layers and the hidden states: the activations inside a layer and
Python's own objects."""
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 16),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 17),
}
"""glibc gives back what is freed at once: what it would keep for later differs by a third from run
to run."""
LAYERS = 3
SCHEMES: dict[str, dict[str, Any]] = {
    "FP8 static": {"scheme": "FP8"},
    "W4A16 optimal": {"scheme": "W4A16", "weight_observer": "optimal"},
}
SAMPLES, TOKENS = 16, 64


def main() -> int:
    """Measure, print, and return 1 if the sequential pipeline takes more than it may."""
    options = parse_arguments()
    if options.folder:
        measured = measure(options.folder, options.pipeline, options.scheme)
        print(json.dumps(measured))
        return 0
    results = measure_all(options.layers, options.hidden)
    Console().print(table(results))
    return int(exceeded(results))


def exceeded(results: list[dict[str, Any]]) -> bool:
    """Whether a pipeline that has a limit took more."""
    return any(result["peak"] > result["limit"] for result in results if result["limit"])


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Peak memory of the pipelines.")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--pipeline", choices=["sequential", "basic"], default="sequential")
    parser.add_argument("--scheme", choices=SCHEMES, default="FP8 static")
    parser.add_argument("--folder", type=Path, help="measure this model, in this process")
    return parser.parse_args()


def measure_all(layers: int, hidden: int) -> list[dict[str, Any]]:
    """Measure every pipeline with every scheme on one model."""
    with tempfile.TemporaryDirectory(prefix="calipers-") as place:
        folder = Path(place) / "model"
        make_model(folder, layers, hidden)
        return [
            measure_apart(folder, pipeline, scheme)
            for scheme in SCHEMES
            for pipeline in ("sequential", "basic")
        ]


def measure_apart(folder: Path, pipeline: str, scheme: str) -> dict[str, Any]:
    """Measure in a fresh process."""
    settings = {"--folder": str(folder), "--pipeline": pipeline, "--scheme": scheme}
    command = [sys.executable, __file__, *(word for pair in settings.items() for word in pair)]
    environment = {**os.environ, **ALLOCATOR}
    finished = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """Write a random Llama in bfloat16, a file for each layer."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=256,
        dtype=torch.bfloat16,
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    files: dict[str, list[str]] = {}
    for name in model.state_dict():
        number = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{number}.safetensors", []).append(name)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for seed, (file, names) in enumerate(files.items()):
        torch.manual_seed(seed)
        tensors = {name: random_tensor(name, shapes[name]) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    where = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def random_tensor(name: str, shape: torch.Size) -> torch.Tensor:
    """Return values of the size that those of a trained model have."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, dtype=torch.bfloat16) * 0.02


def measure(folder: Path, pipeline: str, scheme: str) -> dict[str, Any]:
    """Quantize the model, and return how far memory rose above the state before."""
    with tempfile.TemporaryDirectory(prefix="calipers-") as place:
        tiny = Path(place) / "tiny"
        make_model(tiny, 1, 256)
        quantize(tiny, pipeline, scheme, Path(place) / "warm")
        started = time.perf_counter()
        peaks = peaks_above_now(lambda: quantize(folder, pipeline, scheme, Path(place) / "out"))
        seconds = time.perf_counter() - started
    config = LlamaConfig.from_pretrained(folder)
    layer = (folder / "model-0.safetensors").stat().st_size
    hidden_states = SAMPLES * TOKENS * int(config.hidden_size) * 2
    bounded = pipeline == "sequential"
    return {
        "scheme": scheme,
        "pipeline": pipeline,
        "layer": layer,
        "model": layer * int(config.num_hidden_layers),
        "limit": LAYERS * layer + hidden_states + ALLOWANCE if bounded else None,
        "seconds": round(seconds, 1),
        **peaks,
    }


def quantize(folder: Path, pipeline: Any, scheme: str, output: Path) -> None:
    """Do the work that is measured."""
    torch.manual_seed(0)
    modifier = {"targets": "Linear", "ignore": ["lm_head"], **SCHEMES[scheme]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", calipers.CalipersWarning)
        calipers.oneshot(
            folder,
            {"modifiers": [{"QuantizationModifier": modifier}]},
            torch.randint(256, (SAMPLES, TOKENS)),
            pipeline=pipeline,
            output_dir=output,
            progress=False,
        )


def peaks_above_now(work: Callable[[], object]) -> dict[str, int]:
    """Run something, and return the largest rise of memory: of all, and of each kind."""
    before = resident()
    peaks, ended = dict(before), threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            for kind, value in resident().items():
                peaks[kind] = max(peaks[kind], value)

    watcher = threading.Thread(target=watch)
    # The kernel's own peak misses nothing; the thread tells the kinds apart.
    Path("/proc/self/clear_refs").write_text("5")
    watcher.start()
    work()
    ended.set()
    watcher.join()
    peaks["peak"] = max(peaks["peak"], status()["VmHWM"])
    return {kind: peaks[kind] - before[kind] for kind in peaks}


def resident() -> dict[str, int]:
    """Return the memory that is resident now: in all, anonymous, of mapped files."""
    now = status()
    return {"peak": now["VmRSS"], "anonymous": now["RssAnon"], "mapped": now["RssFile"]}


def status() -> dict[str, int]:
    """Return what the kernel says about the memory of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.startswith(("Vm", "Rss")))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def table(results: list[dict[str, Any]]) -> Table:
    """Lay out the results."""
    layer, model = results[0]["layer"], results[0]["model"]
    title = f"Peak memory, one layer {layer / MIB:.0f} MiB, all layers {model / MIB:.0f} MiB"
    made = Table(title=title, title_justify="left")
    made.add_column("scheme")
    made.add_column("pipeline")
    for column in ("peak MiB", "anonymous", "mapped", "limit", "peak ÷ layer", "seconds"):
        made.add_column(column, justify="right")
    for row in results:
        sizes = [f"{row[kind] / MIB:.0f}" for kind in ("peak", "anonymous", "mapped")]
        limit = f"{row['limit'] / MIB:.0f}" if row["limit"] else "–"
        over = bool(row["limit"]) and row["peak"] > row["limit"]
        ratio = f"{row['peak'] / layer:.1f}"
        cells = [row["scheme"], row["pipeline"], *sizes, limit, ratio, f"{row['seconds']:.0f}"]
        made.add_row(*cells, style="bold red" if over else "")
    return made


if __name__ == "__main__":
    sys.exit(main())
