"""Which scheme a module of a checkpoint has: every tool says what compressed-tensors says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from quantizing import model_folder
from transformers import AutoConfig, AutoModelForCausalLM

import calipers
from calipers.checkpoint.reader import load_skeleton
from calipers.engine.dry_run import dry_run
from calipers.reporting.description import describe_checkpoint

GROUPS = {
    "by class": (["Linear"], 8),
    "by pattern": (["re:.*mlp.*proj$"], 4),
    "by another": (["re:.*down_proj$"], 3),
    "by name": (["model.layers.1.self_attn.v_proj", "re:.*gate_proj$"], 2),
}
IGNORED = ["lm_head", "re:.*[.]0[.].*o_proj", "model.layers.1.mlp.up_proj"]


def by_compressed_tensors(folder: Path) -> dict[str, int]:
    """Module → the bits of its weight, as the library resolves targets and ``ignore``."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        read = QuantizationConfig.model_validate(config.quantization_config)
        apply_quantization_config(model, read, show_progress=False)
    return {
        name: module.quantization_scheme.weights.num_bits
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }


@pytest.mark.parametrize("reverse", [False, True])
def test_groups_that_overlap(reverse: bool, tmp_path: Path) -> None:
    """Whatever their order in the config."""
    source, folder = model_folder(tmp_path / "model"), tmp_path / "out"
    groups = {
        name: {"targets": targets, "weights": {"num_bits": bits, "strategy": "channel"}}
        for name, (targets, bits) in GROUPS.items()
    }
    step = {"QuantizationModifier": {"config_groups": groups, "ignore": IGNORED}}
    recipe = calipers.load_recipe({"modifiers": [step]})
    planned = dry_run(load_skeleton(source), recipe).rows
    calipers.oneshot(source, recipe, output_dir=folder, progress=False)
    config = json.loads((folder / "config.json").read_text())
    stored = config["quantization_config"]["config_groups"]
    given = [targets for targets, _ in GROUPS.values()]
    assert sorted(group["targets"] for group in stored.values()) == sorted(given)
    if reverse:
        config["quantization_config"]["config_groups"] = dict(reversed(stored.items()))
        (folder / "config.json").write_text(json.dumps(config))

    expected = by_compressed_tensors(folder)
    assert sorted(expected.values()) == [2, 2, 2, 3, 3, 4, 8, 8, 8, 8, 8, 8]
    labels = {name: f"int{bits}" for name, bits in expected.items()}
    assert {row.module: row.format for row in planned} == labels
    found = calipers.lint(folder)
    assert found.counts["error"] == 0
    assert {each.name: each.scheme.split()[0] for each in found.weights} == labels
    (facts,) = calipers.report(folder).content.checkpoints
    assert {row.name: row.scheme.split()[0] for row in facts.modules} == labels
    shown = describe_checkpoint(folder).checkpoint.weights
    assert {name: each.weights.num_bits for name, each in shown.items()} == expected  # type: ignore[union-attr]
