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
from calipers.checkpoint.description import describe_checkpoint
from calipers.checkpoint.reader import load_skeleton
from calipers.engine.dry_run import dry_run

NAMED = "model.layers.1.self_attn.v_proj"
GROUPS = {
    "by class": (["Linear"], 8),
    "by pattern": (["re:.*(self_attn|mlp)[.].*proj$"], 4),
    "by another": (["re:.*down_proj$"], 8),
    "by name": ([NAMED, "re:.*gate_proj$"], 3),
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


@pytest.mark.parametrize("order", [list(GROUPS), list(reversed(GROUPS))], ids=["as is", "reversed"])
def test_groups_that_overlap(order: list[str], tmp_path: Path) -> None:
    source, folder = model_folder(tmp_path / "model"), tmp_path / "out"
    groups = {
        name: {"targets": targets, "weights": {"num_bits": bits, "strategy": "channel"}}
        for name, (targets, bits) in ((name, GROUPS[name]) for name in order)
    }
    step = {"QuantizationModifier": {"config_groups": groups, "ignore": IGNORED}}
    recipe = calipers.load_recipe({"modifiers": [step]})
    planned = dry_run(load_skeleton(source), recipe).rows
    calipers.oneshot(source, recipe, output_dir=folder, progress=False)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    stored = config["quantization_config"]["config_groups"]
    assert {name: group["targets"] for name, group in stored.items()} == {
        name: GROUPS[name][0] for name in order
    }  # as they were given

    expected = by_compressed_tensors(folder)
    assert sorted(expected.values()) == [3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 8, 8]
    labels = {name: f"int{bits}" for name, bits in expected.items()}
    assert {row.module: row.format for row in planned} == labels
    found = calipers.lint(folder)
    assert found.findings == ()
    assert {each.name: each.scheme.split()[0] for each in found.weights} == labels
    (facts,) = calipers.report(folder).content.checkpoints
    assert {row.name: row.scheme.split()[0] for row in facts.modules} == labels
    shown = describe_checkpoint(folder).checkpoint.weights
    assert {name: each.weights.num_bits for name, each in shown.items()} == expected  # type: ignore[union-attr]
