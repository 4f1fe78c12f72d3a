"""Perplexity of stories15M before its checkpoint is written, and after it is loaded again.

All of it runs in bfloat16, as whoever loads the checkpoint would run it. The peer is asked last:
it changes transformers for all that follow.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from contenders import OURS, PEER
from recipes import FP8, GROUP, INT8, STATIC, Recipe, grouped, quantized, recipe
from rich.console import Console
from running import run_oneshot
from stories import load_model, load_stories, load_tokenizer
from tables import Column, Row, mark, table
from torch import Tensor
from transformers import AutoModelForCausalLM

SECTION = "checkpoints"
CALIBRATION, EVALUATION = 40, 60  # stories
BLOCK = {"block_structure": [GROUP, GROUP]}

RECIPES: dict[str, Recipe] = {
    **{f"W{bits}A16": recipe(grouped(bits)) for bits in range(2, 9)},
    "W4A16 asymmetric": recipe(grouped(4, symmetric=False)),
    "W8A8": recipe(quantized("W8A8")),
    "W8A8 static": recipe({**quantized("W8A8"), "input_activations": INT8}),
    "FP8": recipe(quantized("FP8", inputs=STATIC)),
    "FP8_DYNAMIC": recipe(quantized("FP8_DYNAMIC")),
    "FP8_BLOCK": recipe(quantized("FP8_BLOCK", weights=BLOCK, inputs={"group_size": GROUP})),
    "NVFP4": recipe(quantized("NVFP4")),
    "NVFP4A16": recipe(quantized("NVFP4A16")),
    "MXFP4A16": recipe(quantized("MXFP4A16")),
    "MXFP8": recipe(quantized("MXFP8")),
    "FP8 KV cache": recipe(kv_cache_scheme=FP8, ignore=[]),
    "FP8 + FP8 KV cache": recipe(quantized("FP8", inputs=STATIC), kv_cache_scheme=FP8),
    "mixed": recipe(
        quantized("FP8", "re:.*self_attn.*_proj", inputs=STATIC),
        {**grouped(4), "targets": ["re:.*mlp.*_proj"]},
    ),
}


def measure_checkpoints(console: Console, count: int | None) -> list[Row]:
    """Write and load each scheme with both libraries, and print what is left of the model."""
    started = time.perf_counter()
    stories = load_stories("evaluation", count or EVALUATION)
    base = perplexity(load_model(), stories)
    rows = list(ours(stories, base, console))
    for row in rows:
        add_peer(row, stories, base)
        console.print(f"  peer {row['scheme']} {row.get('peer_says', '')}", style="dim")
    unequal = [row["scheme"] for row in rows if not row["reached"]]
    verdict = f"differs for {', '.join(unequal)}" if unequal else "is equal for every scheme"
    console.print(f"{SECTION}: float {base:.4f} on {len(stories)} stories", style="bold")
    console.print(table(COLUMNS, rows))
    for row in rows:
        if "peer_says" in row:
            console.print(f"The peer on {row['scheme']}: {row['peer_says']}", markup=False)
    console.print(f"Perplexity of the loaded checkpoint {verdict}.", style="bold")
    console.print(f"Took {time.perf_counter() - started:.0f} s.\n")
    return rows


def ours(stories: Sequence[Tensor], base: float, console: Console) -> Iterator[Row]:
    """Judge each scheme by what Calipers has in memory, and by what transformers loads."""
    data = load_stories("calibration", CALIBRATION)
    for name, given in RECIPES.items():
        with tempfile.TemporaryDirectory() as folder:
            goal = Path(folder) / "checkpoint"
            model = run_oneshot(OURS, load_model(), given, data, load_tokenizer(), goal)
            loaded = AutoModelForCausalLM.from_pretrained(goal, dtype="auto")
            memory, after = perplexity(model, stories), perplexity(loaded, stories)
        console.print(f"  ours {name} {memory:.4f} {after:.4f}", style="dim")
        yield {
            "scheme": name,
            "memory": memory,
            "loaded": after,
            "loaded_to_memory": after / memory,
            "reached": after == memory,
            "increase": after - base,
        }


def add_peer(row: Row, stories: Sequence[Tensor], base: float) -> None:
    """Let the peer do the same, as far as it can."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            given, data = RECIPES[row["scheme"]], load_stories("calibration", CALIBRATION)
            run_oneshot(PEER, load_model(), given, data, load_tokenizer(), Path(folder))
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
            row["peer"] = perplexity(loaded, stories)
        except Exception as error:
            row["peer_says"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            return
    row["peer_increase"] = row["peer"] - base
    if row["peer_increase"] > 0:
        row["increase_to_peer"] = row["increase"] / row["peer_increase"]


@torch.no_grad()
def perplexity(model: Any, stories: Sequence[Tensor]) -> float:
    """Return the perplexity of a model as it is, with the cache it has by default."""
    total, count = 0.0, 0
    for story in stories:
        logits, targets = model(story).logits[0, :-1].double(), story[0, 1:]
        total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += len(targets)
    return math.exp(total / count)


COLUMNS = (
    Column("scheme", "scheme"),
    Column("in memory", "memory", "{:.4f}".format),
    Column("loaded", "loaded", "{:.4f}".format),
    Column("loaded ÷ memory", "loaded_to_memory", "{:.6f}".format),
    Column("equal", "reached", mark),
    Column("increase", "increase", "{:+.4f}".format),
    Column("peer's loaded", "peer", "{:.4f}".format),
    Column("increase ÷ peer's", "increase_to_peer", "{:.3f}".format),
)
