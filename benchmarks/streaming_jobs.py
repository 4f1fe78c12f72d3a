"""What streaming.py runs in processes of their own: ``python streaming_jobs.py JOB SETTINGS``.

Libraries are imported before the clock starts; the last line that is printed is the result.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from recipes import INT8, Recipe, grouped, quantized, recipe
from stories import load_stories, shared_folder
from tables import Row

import calipers
from calipers.steps import QuantizationModifier

OURS, PEER = "calipers", "llm-compressor"
STORIES = 128
SCHEMES: dict[str, Recipe] = {
    "W4A16 minmax": recipe(grouped(4, observer="memoryless_minmax")),
    "W4A16 optimal imatrix": recipe(
        grouped(4, observer="optimal", observer_kwargs={"importance": "imatrix"})
    ),
    "W8A16": recipe(grouped(8, observer="memoryless_mse")),
    "FP8 static": recipe(quantized("FP8", inputs={"observer": "static_minmax"})),
    "FP8_DYNAMIC": recipe(quantized("FP8_DYNAMIC")),
    "W8A8 static histogram_mse": recipe(
        {**quantized("W8A8"), "input_activations": {**INT8, "observer": "histogram_mse"}}
    ),
    "W8A8 dynamic": recipe(quantized("W8A8")),
    "NVFP4A16 mse": recipe(quantized("NVFP4A16", weights={"observer": "memoryless_mse"})),
    "NVFP4": recipe(quantized("NVFP4")),
    "MXFP4A16": recipe(quantized("MXFP4A16")),
}


def stories_folder() -> Path:
    """Return where stories15M is."""
    return shared_folder() / "models" / "stories15M"


def quantize_files(settings: dict[str, Any]) -> Row:
    """Quantize a folder with one library."""
    from transformers import LlamaForCausalLM  # noqa: F401  # imported only when it is used

    model, output = settings["model"], settings["output"]
    if settings["library"] == OURS:
        given = QuantizationModifier(**settings["recipe"])
        return timed(partial(calipers.quantize, model, given, output_dir=output, progress=False))
    from llmcompressor.modifiers.quantization import QuantizationModifier as PeerModifier

    return timed(peer_call(model, PeerModifier(**settings["recipe"]), output))


def peer_call(model: str, given: Any, output: str, **data: Any) -> Callable[[], object]:
    """Return a call of the peer, which writes packed weights."""
    from llmcompressor.entrypoints.oneshot import oneshot as peer_oneshot

    return partial(peer_oneshot, model=model, recipe=given, output_dir=output, **data)


def calibrate_peer(settings: dict[str, Any]) -> Row:
    """Let the peer calibrate and write stories15M once."""
    from llmcompressor.modifiers.quantization import QuantizationModifier as PeerModifier
    from running import as_loader

    data = as_loader(load_stories("calibration")[:STORIES])
    given = PeerModifier(**settings["recipe"])
    model = str(stories_folder())
    return timed(
        peer_call(model, given, settings["output"], dataset=data, num_calibration_samples=len(data))
    )


def ten_schemes(settings: dict[str, Any]) -> Row:
    """Measure stories15M once, and write a checkpoint of each scheme."""
    stories = load_stories("calibration")[:STORIES]
    data = [{"input_ids": story} for story in stories]
    model, seen = stories_folder(), Path(settings["output"]) / "seen.safetensors"
    seen.parent.mkdir()
    rows: Row = {"measuring": timed(partial(calipers.measure, model, data, output_file=seen))}
    for name, given in SCHEMES.items():
        output = seen.parent / name.replace(" ", "-")
        modifier = QuantizationModifier(**given)
        rows[name] = timed(partial(calipers.quantize, model, modifier, seen, output))
    return rows


def timed(call: Callable[[], object]) -> Row:
    """Return the seconds of a call, its processor time, and the most memory it ever took."""
    warnings.simplefilter("ignore")
    started, used = time.perf_counter(), time.process_time()
    call()
    seconds, processor = time.perf_counter() - started, time.process_time() - used
    return {"seconds": seconds, "processor_seconds": processor, "peak": peak_bytes()}


def peak_bytes() -> int:
    """Return the most memory that was ever resident in this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


JOBS: dict[str, Callable[[dict[str, Any]], Row]] = {
    "quantize": quantize_files,
    "schemes": ten_schemes,
    "calibrate": calibrate_peer,
}


if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](json.loads(sys.argv[2]))))
