"""Write checkpoints of many recipes with two versions of Calipers, and compare them byte by byte.

    python scripts/same_checkpoints.py OLD_PYTHON NEW_PYTHON [--only PATTERN]

The two are interpreters of virtual environments, each with its version installed. Models and data
are made once and used by both. Besides the bytes of every file, ``calipers.json`` is compared by
its content: figures in it may be listed in another order.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

NVFP4_IMATRIX = {"scheme": "NVFP4A16", "weight_observer": "nvfp4_expanded_imatrix"}
STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
SEED_OBSERVERS = {
    "targets": ["Linear"],
    "scheme": "W8A8_STATIC",
    "activation_observer": {"name": "mse", "averaging_constant": 0.01},
}
SEED_ARGS = {
    "targets": ["Linear"],
    "weights": {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "observer": "mse",
        "observer_kwargs": {"maxshrink": 0.1, "patience": 10, "grid": 128.0, "norm": 2.0},
    },
}
MIXED = {
    "config_groups": {
        "attention": {
            "targets": ["re:.*self_attn.*_proj$"],
            "weights": {"num_bits": 8, "strategy": "channel", "observer": "memoryless_mse"},
            "input_activations": {**STATIC, "observer": "histogram_mse"},
        },
        "mlp": {
            "targets": ["re:.*mlp.*_proj$"],
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
        },
    },
    "kv_cache_scheme": KV_CACHE,
}


def one(modifier: dict[str, Any]) -> list[Any]:
    """Return a recipe of one modifier, which leaves the head alone."""
    return [{"QuantizationModifier": {"ignore": ["lm_head"], **modifier}}]


def gptq(modifier: dict[str, Any]) -> list[Any]:
    """Return a recipe that rounds with error feedback, and leaves the head alone."""
    return [{"GPTQModifier": {"ignore": ["lm_head"], **modifier}}]


# Name: the model, the modifiers, options of oneshot, the number of processes.
CASES: dict[str, tuple[str, Any, dict[str, Any], int]] = {
    "w4a16": ("demo", one({"scheme": "W4A16"}), {}, 1),
    "w4a16-asym-mse": ("demo", one({"scheme": "W4A16_ASYM", "weight_observer": "mse"}), {}, 1),
    "w3a16-optimal-hessian": (
        "demo",
        one({"scheme": "W3A16", "weight_observer": {"name": "optimal", "importance": "hessian"}}),
        {"group_size": 32},
        1,
    ),
    "w4a16-optimal": ("demo", one({"scheme": "W4A16", "weight_observer": "optimal"}), {}, 1),
    "w4a16-signed": (
        "demo",
        one({"scheme": "W4A16", "weight_observer": {"name": "optimal", "signed_scale": True}}),
        {},
        1,
    ),
    "w8a16": ("demo", one({"scheme": "W8A16"}), {}, 1),
    "w8a8-dynamic": ("demo", one({"scheme": "W8A8"}), {}, 1),
    "w8a8-static-percentile": (
        "demo",
        one({"scheme": "W8A8_STATIC", "activation_observer": "percentile"}),
        {},
        1,
    ),
    "w4a8": ("demo", one({"scheme": "W4A8"}), {}, 1),
    "fp8": ("demo", one({"scheme": "FP8", "activation_observer": "histogram_mse"}), {}, 1),
    "fp8-dynamic": ("demo", one({"scheme": "FP8_DYNAMIC"}), {}, 1),
    "fp8-block": ("demo", one({"scheme": "FP8_BLOCK"}), {}, 1),
    "nvfp4": ("demo", one({"scheme": "NVFP4", "weight_observer": "optimal"}), {}, 1),
    "nvfp4a16-expanded": ("demo", one(NVFP4_IMATRIX), {}, 1),
    "mxfp4a16": ("demo", one({"scheme": "MXFP4A16", "weight_observer": "memoryless_mse"}), {}, 1),
    "mxfp8": ("demo", one({"scheme": "MXFP8"}), {}, 1),
    "seed-activation-observer": ("demo", [{"QuantizationModifier": SEED_OBSERVERS}], {}, 1),
    "seed-explicit-args": ("demo", [{"QuantizationModifier": SEED_ARGS}], {}, 1),
    "imatrix-gatherer": (
        "demo",
        [
            {"IMatrixGatherer": {"ignore": ["lm_head"]}},
            *one({"scheme": "W4A16", "weight_observer": "imatrix_mse"}),
        ],
        {},
        1,
    ),
    "gptq-w4a16": ("demo", gptq({"scheme": "W4A16"}), {}, 1),
    "gptq-nvfp4a16": (
        "demo",
        gptq({"scheme": "NVFP4A16", "error_propagation": "quantized"}),
        {},
        1,
    ),
    "gptq-w3a16-plain": (
        "demo",
        gptq({"scheme": "W3A16", "error_propagation": "float", "actorder": None, "sweeps": 0}),
        {"group_size": 32},
        1,
    ),
    "mixed-kv-cache": ("demo", one(MIXED), {}, 1),
    "attention": (
        "llama",
        [{"QuantizationModifier": {"targets": ["LlamaAttention"], "input_activations": STATIC}}],
        {},
        1,
    ),
    "sequential": ("demo", one(MIXED), {"pipeline": "sequential"}, 1),
    "two-ranks": ("demo", one(MIXED), {}, 2),
    "mixtral-peers": (
        "mixtral",
        one({"scheme": "W8A8_STATIC", "weight_observer": "imatrix_mse"}),
        {"on_unseen": "peers"},
        1,
    ),
    "qwen3-moe-weights-only": (
        "qwen3_moe",
        one({"scheme": "NVFP4", "weight_observer": "optimal"}),
        {"on_unseen": "weights_only", "pipeline": "sequential"},
        1,
    ),
    "mixtral-all-experts": (
        "mixtral",
        one({"scheme": "FP8"}),
        {"calibrate_all_experts": True},
        2,
    ),
}


# Name: the recipe, options of quantize. "advised" is what advise makes of the measurements.
FROM_MEASUREMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "measured-fp8": ("FP8", {"activation_observer": "histogram_mse"}),
    "measured-nvfp4": ("NVFP4", {"weight_observer": "optimal"}),
    "measured-gptq": ("W4A16", {"method": "gptq"}),
    "measured-advised": ("advised", {}),
}


def make_models(folder: Path) -> None:
    """Save small random models that both versions quantize."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        LlamaConfig,
        MixtralConfig,
        PretrainedConfig,
        Qwen3MoeConfig,
    )

    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
    }
    configs: dict[str, PretrainedConfig] = {
        "llama": LlamaConfig(**sizes),
        "mixtral": MixtralConfig(**sizes, num_local_experts=6),
        "qwen3_moe": Qwen3MoeConfig(
            **sizes, moe_intermediate_size=64, num_experts=6, num_experts_per_tok=2
        ),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.bfloat16
        )
        model.save_pretrained(folder / name)


def write(case: str, models: Path, output: Path) -> None:
    """Write the checkpoint of a case with the version that this interpreter has."""
    import torch

    import calipers
    from calipers.demo import MODEL

    data = torch.randint(4, 250, (12, 96), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case in FROM_MEASUREMENTS:
            recipe, options = FROM_MEASUREMENTS[case]
            seen = calipers.measure(
                MODEL, data, collect="hessian,sensitivity", dtype="float32", progress=False
            )
            if recipe == "advised":
                recipe = calipers.advise(MODEL, seen, budget="6bpw", progress=False).recipe
            calipers.quantize(MODEL, recipe, seen, output, progress=False, **options)
            return
        name, modifiers, options, _ = CASES[case]
        source = MODEL if name == "demo" else models / name
        calipers.oneshot(
            source,
            {"modifiers": modifiers},
            data,
            output_dir=output,
            dtype="float32",
            num_calibration_samples=12,
            batch_size=4,
            progress=False,
            **options,
        )


def run(python: str, case: str, models: Path, output: Path) -> None:
    """Let an interpreter write the checkpoint of a case."""
    ranks = CASES[case][3] if case in CASES else 1
    launch = [] if ranks == 1 else ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    command = [python, *launch, __file__, "--write", case, str(models), str(output)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def differences(old: Path, new: Path) -> list[str]:
    """Name the files that differ."""
    names = sorted({path.name for folder in (old, new) for path in folder.iterdir()})
    return [name for name in names if not _same(old / name, new / name)]


def _same(old: Path, new: Path) -> bool:
    if not (old.exists() and new.exists()):
        return False
    if old.name == "calipers.json":
        return _is_close(*(json.loads(path.read_text()) for path in (old, new)))
    return old.read_bytes() == new.read_bytes()


def _is_close(one: Any, two: Any) -> bool:
    """Whether plain data is the same, but for the last digits of sums in another order or dtype."""
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_is_close(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_is_close, one, two))
    if isinstance(one, float) and isinstance(two, float):
        return math.isclose(one, two, rel_tol=1e-7)
    return bool(one == two)


def main() -> int:
    """Compare two versions, or write one checkpoint for such a comparison."""
    if sys.argv[1:2] == ["--write"]:
        write(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", help="the interpreter of the one version")
    parser.add_argument("new", help="the interpreter of the other")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="names, such as 'fp8*'")
    given = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_models(folder)
        for case in fnmatch.filter([*CASES, *FROM_MEASUREMENTS], given.only):
            for side in ("old", "new"):
                run(getattr(given, side), case, folder, folder / side / case)
            found = differences(folder / "old" / case, folder / "new" / case)
            failed += bool(found)
            print(f"{case:26} {'same' if not found else 'DIFFERENT: ' + ', '.join(found)}")
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
