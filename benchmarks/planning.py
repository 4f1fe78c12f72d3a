"""How long it takes to say what a recipe means for a model of very many experts.

    python benchmarks/planning.py --layers 40 --experts 512

The model has no values. What planning is held against is the time to build it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from calipers import load_recipe
from calipers.engine.dry_run import dry_run

T = TypeVar("T")

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def build(layers: int, experts: int) -> Any:
    """Build a mixture of experts without values."""
    config = Qwen3MoeConfig(**SIZES, num_hidden_layers=layers, num_experts=experts)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]


def timed(what: str, job: Callable[[], T]) -> tuple[T, float]:
    """Do something, and say how long it took."""
    start = time.perf_counter()
    result = job()
    seconds = time.perf_counter() - start
    print(f"{what:42} {seconds:7.2f} s")
    return result, seconds


def main() -> None:
    """Time the plan alone, and the dry run that ``calipers plan`` shows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--experts", type=int, default=512, help="of each layer")
    given = parser.parse_args()
    print(f"{given.layers * given.experts:,} experts")
    recipe = load_recipe("W4A16")
    model, building = timed("build the model", lambda: build(given.layers, given.experts))
    found, planning = timed("plan and sizes (calipers plan)", lambda: dry_run(model, recipe))
    print(f"{len(found.rows):,} tensors; {planning / building:.1f} × the time to build the model")


if __name__ == "__main__":
    main()
