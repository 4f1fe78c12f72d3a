"""Time of GPTQ on a whole model, beside llm-compressor's on the same samples, in one run.

The model is a random Llama of the shape of SmolLM2-135M, in bfloat16; samples have 300 to 1,200
tokens and run one at a time, as both libraries do by default. The peer takes its fastest scales
(min-max); ours are the default of GPTQModifier (exact, under the Hessian). Every contender runs in
a process of its own, and the fastest of its rounds counts.

    python benchmarks/gptq.py [--layers 30] [--threads 2] [--rounds 1]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from contenders import OURS, PEER  # says what to do if the peer is not installed
from racing import seconds_of_others
from rich.console import Console
from tables import number
from transformers import AutoModelForCausalLM, LlamaConfig

from calipers.kernels import describe

SAMPLES, VOCABULARY = 16, 49152
PROPAGATIONS = ("both", "quantized", "float")
WEIGHTS = {"num_bits": 4, "strategy": "group", "group_size": 64}
ASKED = {"both": 1.0, "quantized": 0.5, "float": 0.5}


def main() -> int:
    """Run every contender, and print a row for each."""
    options = parse_arguments()
    if options.contender:
        print(json.dumps(run(options)))
        return 0
    console = Console(width=110, highlight=False)
    versions = {name: version(name) for name in ("torch", "llmcompressor", "compressed-tensors")}
    tokens = sum(map(len, samples()))
    console.print(f"{options.layers} layers, {SAMPLES} samples, {tokens:,} tokens, {versions}")
    console.print(f"{describe()}\n")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options.layers)
        started, used = time.perf_counter(), seconds_of_others()
        best: dict[str, float] = {}
        for _ in range(options.rounds):
            for contender in (PEER, *PROPAGATIONS):
                seconds = in_process(contender, folder, options)
                best[contender] = min(seconds, best.get(contender, seconds))
        used = max(0.0, seconds_of_others() - used) / (time.perf_counter() - started)
    console.print(f"{PEER}, GPTQ, memoryless_minmax: {number(best[PEER])} s")
    for name in PROPAGATIONS:
        ratio = best[name] / best[PEER]
        verdict = "reached" if ratio <= ASKED[name] else "missed"
        console.print(
            f"{OURS}, GPTQ, error_propagation {name}: {number(best[name])} s, {ratio:.2f} of the "
            f"peer's time (asked {ASKED[name]}: {verdict})"
        )
    console.print(f"Other programs used {used:.2f} cores meanwhile.")
    return 0


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Time of GPTQ against the peer.")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def samples() -> list[list[int]]:
    """Return token ids of different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(300, 1200, (SAMPLES,), generator=generator).tolist()
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def write_model(folder: Path, layers: int) -> None:
    """Write the model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16).save_pretrained(folder)


def in_process(contender: str, folder: str, options: argparse.Namespace) -> float:
    """Return the seconds that a contender takes in a process of its own."""
    arguments = ["--contender", contender, "--folder", folder, "--threads", str(options.threads)]
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    seconds: float = json.loads(done.stdout.splitlines()[-1])
    return seconds


def run(options: argparse.Namespace) -> float:
    """Quantize the model once, and return the seconds that it took without loading it."""
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.bfloat16)
    quantize = run_peer if options.contender == PEER else run_ours
    started = time.perf_counter()
    quantize(model, options.contender)
    return time.perf_counter() - started


def run_ours(model: Any, propagation: Any) -> None:
    """Quantize with Calipers."""
    import warnings

    import calipers

    warnings.simplefilter("ignore", calipers.CalipersWarning)  # there is little data
    recipe: dict[str, Any] = {"weights": WEIGHTS, "ignore": "lm_head"}
    modifier = calipers.GPTQModifier(**recipe, error_propagation=propagation)
    calipers.oneshot(model, modifier, samples(), num_calibration_samples=SAMPLES, progress=False)


def run_peer(model: Any, _: str) -> None:
    """Quantize with llm-compressor, layer by layer, as it does by default."""
    from llmcompressor.entrypoints.oneshot import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from loguru import logger
    from running import as_loader
    from stories import load_tokenizer

    logger.level("METRIC", no=38)  # which it registers only where it logs
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, "observer": "memoryless_minmax"}}
    oneshot(
        model=model,
        recipe=GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"]),
        dataset=as_loader([torch.tensor([ids]) for ids in samples()]),
        tokenizer=load_tokenizer(),
        num_calibration_samples=SAMPLES,
    )


if __name__ == "__main__":
    sys.exit(main())
