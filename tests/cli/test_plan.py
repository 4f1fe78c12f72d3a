"""What ``calipers plan`` foretells is what comes to pass."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SIZES, build, saved, token_ids
from models import random_model
from shell import run, run_here
from transformers import DeepseekV3Config

import calipers
from calipers.checkpoint.headers import size_on_disk
from calipers.checkpoint.reader import load_model, load_skeleton
from calipers.cli.rendering import common_name
from calipers.engine.dry_run import DryRun, dry_run
from calipers.errors import format_size

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

PRESETS = (
    *("W4A16", "W4A16_ASYM", "W3A16", "W8A16", "W8A8", "W4A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK"),
    *("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8"),
)
KV_CACHE = {"scheme": "W8A16", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}}
HEAD_TOO = {"scheme": "W8A16"}
FP8_HEAD_TOO = {"scheme": "FP8_DYNAMIC"}  # whose weights keep their name
MIXED = {"scheme": {"W4A16": ["re:.*q_proj"], "W8A16": ["re:.*o_proj"]}, "ignore": ["lm_head"]}
EMBEDDING = {"targets": "Embedding", "weights": {"num_bits": 8, "strategy": "channel"}}
ASYM_CHANNEL = {"weights": {"num_bits": 3, "symmetric": False, "strategy": "channel"}}
BY_FAMILY: dict[str, tuple[Any, ...]] = {
    "llama": (*PRESETS, KV_CACHE, HEAD_TOO, MIXED, ASYM_CHANNEL),
    "llama tied": ("W4A16", "NVFP4", HEAD_TOO, FP8_HEAD_TOO, EMBEDDING),
    "qwen2": ("W4A16_ASYM", "FP8"),
    "mixtral": ("W4A16_ASYM", "FP8", "NVFP4"),
    "qwen3-moe": ("W4A16", "MXFP4"),
}


def cases() -> Iterator[Any]:
    for family, recipes in BY_FAMILY.items():
        for recipe in recipes:
            named = recipe if isinstance(recipe, str) else " ".join(map(str, recipe))
            yield pytest.param(family, recipe, id=f"{family}-{named}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("families")
    return {
        family: saved(build(family, torch.bfloat16), place / family.replace(" ", "-"))
        for family in BY_FAMILY
    }


def recipe_of(recipe: Any) -> Any:
    modifier = {"QuantizationModifier": recipe}
    return recipe if isinstance(recipe, str) else {"modifiers": [modifier]}


def foretold(folder: Path, recipe: Any) -> DryRun:
    return dry_run(load_skeleton(folder), calipers.load_recipe(recipe_of(recipe)))


@pytest.mark.parametrize(("family", "recipe"), list(cases()))
def test_the_size_is_that_of_the_checkpoint(
    family: str, recipe: Any, folders: dict[str, Path], tmp_path: Path
) -> None:
    source = folders[family]
    found = foretold(source, recipe)
    done = calipers.oneshot(
        source,
        recipe_of(recipe),
        token_ids(),
        output_dir=tmp_path / "out",
        calibrate_all_experts=True,
        progress=False,
    )
    assert found.before == size_on_disk(source)
    assert found.after == size_on_disk(tmp_path / "out")
    keys = ("module", "tensor", "format", "strategy", "observer", "data")
    assert [{key: getattr(row, key) for key in keys} for row in found.rows] == done.plan.rows()
    assert found.needs_data == done.plan.needs_data


@pytest.mark.parametrize("family", list(BY_FAMILY))
def test_what_is_not_quantized_keeps_its_size(family: str, folders: dict[str, Path]) -> None:
    """Also where the head is quantized, and no longer one with the embedding."""
    for recipe in ("W8A16", HEAD_TOO):
        found = foretold(folders[family], recipe)
        before, after = (
            total - sum(getattr(row, side) for row in found.rows)
            for side, total in (("before", found.before), ("after", found.after))
        )
        assert before == after > 0


def test_a_skeleton_has_the_tensors_of_the_model_and_no_values(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        skeleton, loaded = load_skeleton(folder), load_model(folder)
        shapes = [
            {name: (tensor.shape, tensor.dtype) for name, tensor in each.state_dict().items()}
            for each in (skeleton, loaded)
        ]
        assert shapes[0] == shapes[1]
        assert all(tensor.is_meta for tensor in skeleton.state_dict().values())


def test_a_config_without_a_dtype(tmp_path: Path) -> None:
    """The files tell it, as they do when the model is loaded."""
    folder = saved(build("llama", torch.float16), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_skeleton(folder).dtype == load_model(folder).dtype == torch.float16


def test_tensors_that_stay_precise(tmp_path: Path) -> None:
    """The router of DeepSeek has a bias in float32, whatever the dtype of the model is."""
    sizes = {**SIZES, "num_key_value_heads": 4, "moe_intermediate_size": 128}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    config = DeepseekV3Config(**sizes, **experts, first_k_dense_replace=1)
    folder = saved(random_model(config, torch.bfloat16), tmp_path / "model")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    for model in (load_skeleton(folder), load_model(folder)):
        assert model.state_dict()[name].dtype == torch.float32
        assert model.dtype == torch.bfloat16


def test_modules_of_another_dtype() -> None:
    """Scales have the dtype of their module, and groups of 128 values share one."""
    model = build("llama", torch.bfloat16)
    model.get_submodule("model.layers.1.self_attn.q_proj").float()
    rows = dry_run(model, calipers.load_recipe("W4A16")).rows
    found = [(row.before, row.after) for row in rows if row.module.endswith("q_proj")]
    count, shape = 128 * 128, 16
    assert found == [(count * size, count // 2 + count // 128 * size + shape) for size in (2, 4)]


def test_a_plan_needs_no_weights(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folders["llama"] / "config.json").read_bytes())
    assert foretold(tmp_path, "W4A16").after < foretold(tmp_path, "W8A16").after


def test_alike_modules_are_one_row_for_people_and_all_rows_for_machines(model: Path) -> None:
    arguments = ("plan", str(model), "--scheme", "W4A16", "--observer", "optimal")
    told = run(*arguments)
    assert (told.returncode, told.stderr) == (0, "")
    lines = told.stdout.splitlines()
    row = next(line for line in lines if "q_proj" in line)
    assert row.split() == [
        *("model.layers.{0..1}.self_attn.q_proj", "×2", "weight", "int4", "group", "128"),
        *("optimal", "yes", "65.5", "kB", "16.9", "kB"),
    ]
    assert sum("q_proj" in line for line in lines) == 1
    assert "14 tensors quantized; the checkpoint: 658 kB → 220 kB (33%)." in lines
    options = "--data or --measurements of calipers quantize"
    assert f"It needs data, for 14 tensors: {options}." in lines
    assert "int4 per group 128: runs on transformers, vllm-cpu, vllm-cuda (7.5)." in lines

    data = json.loads(run_here(*arguments, "--json").stdout)
    assert len(data["rows"]) == 14
    assert data["before"] == size_on_disk(model)
    assert data["rows"][0] == {
        "module": "model.layers.0.self_attn.q_proj",
        "tensor": "weight",
        "format": "int4",
        "strategy": "group 128",
        "observer": "optimal",
        "data": "yes",
        "before": 128 * 128 * 2,
        "after": 128 * 128 // 2 + 128 * 2 + 16,
        "runs_on": {"transformers": "", "vllm-cpu": "", "vllm-cuda": "7.5"},
    }
    every = run_here(*arguments, "--all").stdout
    assert "model.layers.1.self_attn.q_proj " in every
    assert "×" not in every


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["lm_head"], "lm_head"),
        (["layers.3.mlp"], "layers.3.mlp"),
        ([f"l.{i}.e.{j}.up" for i in (0, 1) for j in (0, 2, 3, 4)], "l.{0..1}.e.{0,2..4}.up"),
        (["h.0", "h.1"], "h.{0..1}"),
        (["conv1d.7.w2", "conv1d.9.w2"], "conv1d.{7,9}.w2"),
    ],
)
def test_one_name_for_many(names: list[str], told: str) -> None:
    assert common_name(names) == told


# Columns of the llama of families.py: 128, and 256 of down_proj. Bytes for each element of a
# Hessian: 8 for each sum (both streams have up to three), of all data and of one fold, and while it
# is at work of the other; and 44 for the factorisation.
@pytest.mark.parametrize(
    ("propagation", "needs"),
    [
        ("both", {"passes": 10, "hessians": 256**2 * (72 + 44), "hessians_at_once": None}),
        ("quantized", {"passes": 5, "hessians": 256**2 * (24 + 44), "hessians_at_once": None}),
        (
            "float",
            {
                "passes": 1,
                "hessians": 3 * 128**2 * 16 + 256**2 * (24 + 44 + 12),
                "hessians_at_once": 2 * (3 * 128**2 + 256**2) * 16 + 256**2 * (8 + 44 + 12),
            },
        ),
    ],
)
def test_what_error_feedback_needs(
    propagation: str, needs: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    given = f"{{scheme: W4A16, ignore: [lm_head], error_propagation: {propagation}}}"
    recipe.write_text(f"modifiers: {{GPTQModifier: {given}}}")
    arguments = ("plan", str(folders["llama"]), "--recipe", str(recipe))
    found = json.loads(run_here(*arguments, "--json").stdout)["feedback"]
    assert found == {"propagation": propagation, **needs}
    told = run_here(*arguments).stdout
    assert f"(error_propagation: {propagation})" in told
    assert f"take up to {format_size(needs['hessians'])} at a time" in told
    assert ("at most 10 runs of the data through each." in told) is (propagation == "both")
    assert foretold(folders["llama"], "W4A16").feedback is None


def test_what_statistics_take(folders: dict[str, Path]) -> None:
    blocks = {"name": "optimal", "importance": "hessian"}
    recipe = calipers.load_recipe("W4A16").changed(weight_observer=blocks)
    found = dry_run(load_skeleton(folders["llama"]), recipe)
    hessians = 2 * (3 * 128**2 + 256**2) * 8  # of two layers; q, k and v have one, gate and up too
    assert hessians < found.statistics < 1.1 * hessians
    arguments = ("plan", str(folders["llama"]), "--scheme", "FP8")
    tables = 2 * 4 * 65_536 * 8  # of each static input
    size = json.loads(run_here(*arguments, "--json").stdout)["statistics"]
    assert tables < size < 1.1 * tables
    said = f"With --data, statistics take about {format_size(size)} of memory."
    assert said in run_here(*arguments).stdout


def test_every_expert_has_a_hessian(folders: dict[str, Path]) -> None:
    recipe = calipers.load_recipe("W4A16").changed(method="gptq")
    found = dry_run(load_skeleton(folders["mixtral"]), recipe).feedback
    assert found is not None
    experts = load_model(folders["mixtral"]).config.num_local_experts
    assert found.hessians == 256**2 * (experts * 16 + 8 + 44 + 12)
    assert found.passes == 10


def test_learned_rounding_keeps_the_hessians_of_a_layer(folders: dict[str, Path]) -> None:
    found = {}
    for method in ("gptq", "rounding"):
        recipe = calipers.load_recipe("W4A16").changed(method=method)
        found[method] = dry_run(load_skeleton(folders["llama"]), recipe).feedback
    few, many = found["gptq"], found["rounding"]
    assert few is not None
    assert many is not None
    # q, k and v have one; so have gate and up.
    assert many.hessians >= few.hessians + 3 * 128**2 * 8
    assert many.passes == few.passes


def test_the_runs_foretold_are_those_that_come_to_pass() -> None:
    model = build("llama")
    layer, runs = model.model.layers[1], 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    layer.register_forward_pre_hook(count)
    recipe = calipers.load_recipe("W4A16").changed(method="gptq")
    calipers.oneshot(model, recipe, token_ids(8), batch_size=8, num_calibration_samples=8)
    needs = dry_run(build("llama"), recipe).feedback
    assert needs is not None
    batches = 2  # one of each fold; the first tells the order of the modules
    assert runs == batches * needs.passes + 1
