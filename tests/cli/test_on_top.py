"""Options put on top of a scheme or a recipe, and what is said of static schemes and dtypes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from families import build, saved
from shell import run_here

from calipers.runtime import precision


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "modifiers:\n"
        "  QuantizationModifier:\n"
        "    ignore: [lm_head]\n"
        "    weights: {num_bits: 4, strategy: group, group_size: 128, observer: mse}\n"
        "    input_activations: {num_bits: 8, observer: minmax}\n"
    )
    return path


def test_a_recipe_takes_observers_and_a_group_size(
    model: Path, text: Path, recipe: Path, tmp_path: Path
) -> None:
    done = run_here(
        *("quantize", str(model), "--recipe", str(recipe), "--data", str(text), "--seq-len", "64"),
        *("--samples", "70", "--seed", "3", "--packing", "-o", str(tmp_path / "out")),
        *("--weight-observer", "imatrix_mse,grid=10,norm=2", "--group-size", "32"),
        *("--activation-observer", "percentile,percentile=99.9", "--dtype", "float32"),
    )
    assert (done.exit_code, "Warning" in done.stderr) == (0, False)
    lines = done.stdout.splitlines()
    weights = "int4 per group 32, imatrix_mse(grid=10, norm=2)"
    assert f"  14 weights: {weights}" in lines
    assert "  14 inputs: int8 per tensor, percentile(percentile=99.9)" in lines
    assert "70 samples, 4,480 tokens seen, computed in float32." in lines
    again = f"--data {text} --skip 70 --seed 3 --seq-len 64 --packing"
    assert lines[-1].endswith(again)
    written = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text())
    carried_out = written["default_stage"]["default_modifiers"]["QuantizationModifier"]
    assert carried_out["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert carried_out["weight_observer"]["name"] == "imatrix_mse"
    assert carried_out["activation_observer"] == {"name": "percentile", "percentile": 99.9}


def test_a_size_that_does_not_divide_names_the_option(tmp_path: Path) -> None:
    changes = {"hidden_size": 288, "intermediate_size": 768, "num_attention_heads": 6}
    folder = saved(build("llama", num_key_value_heads=6, **changes), tmp_path / "model")
    failed = run_here("plan", str(folder), "--scheme", "W4A16")
    assert failed.exit_code == 2
    assert "Sizes that fit every weight: --group-size 96, --group-size 32, --g" in failed.stderr
    told = run_here("plan", str(folder), "--scheme", "W4A16", "--group-size", "96", "--json")
    assert {row["strategy"] for row in json.loads(told.stdout)["rows"]} == {"group 96"}
    refused = run_here("plan", str(folder), "--scheme", "FP8", "--group-size", "96")
    assert refused.exit_code == 2
    assert "--group-size 96 has no meaning here: its weights are float8 per" in refused.stderr


def test_the_text_that_comes_next_is_new(model: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    lines = [
        {"text": f"{number} sheep went over the fence, and so did I. " * 4} for number in range(50)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    options = ("quantize", str(model), "-s", "W8A16", "--observer", "optimal", "-d", str(file))

    def next_command(*more: str) -> list[str]:
        done = run_here(*options, "-o", str(tmp_path / "out"), "--overwrite", "--json", *more)
        assert "static ranges" not in done.stderr  # weights alone have none
        words: list[str] = json.loads(done.stdout)["next"].split()
        return words

    assert next_command()[-2:] == ["--data", "HELD_OUT.jsonl"]  # all 50 were seen
    command = next_command("--samples", "20")
    assert command[-4:] == ["--data", str(file), "--skip", "20"]
    judged = run_here(*command[1:], "--no-layers", "--json")
    assert json.loads(judged.stdout)["samples"] == 30
    beyond = run_here(*command[1:-1], "50", "--no-layers")
    assert beyond.exit_code == 2
    assert "has 50 samples, and --skip 50 passes over all of them" in beyond.stderr
    assert text.exists()


def test_static_int8_is_a_scheme_and_dynamic_is_called_safer(model: Path) -> None:
    told = run_here("plan", str(model), "--scheme", "w8a8_static", "--json")
    found = {
        (row["tensor"], row["format"], row["strategy"]) for row in json.loads(told.stdout)["rows"]
    }
    assert found == {("weight", "int8", "channel"), ("input", "int8", "tensor")}
    listed = run_here("schemes").stdout
    assert "static or dynamic: dynamic activations are the safer choice, since" in listed


def test_the_doctor_says_in_which_dtype_models_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "cpu_features", lambda: {"avx512_bf16": True})
    told = run_here("doctor").stdout
    assert "bfloat16 models: in bfloat16 " in told
    assert "float16 models: in float32, since this CPU has no float16 instructions" in told
    monkeypatch.setattr(precision, "cpu_features", dict)
    facts = json.loads(run_here("doctor", "--json").stdout)
    assert facts["forward_pass"] == {"bfloat16": False, "float16": False}


def test_a_method_is_put_on_top(model: Path, text: Path, tmp_path: Path) -> None:
    how = ("quantize", str(model), "--data", str(text), "--seq-len", "64", "--samples", "20")
    out = tmp_path / "out"
    done = run_here(
        *how, "--scheme", "W4A16", "--method", "gptq", "--group-size", "32", "-o", str(out)
    )
    assert done.exit_code == 0, done.stderr
    assert "  14 weights: int4 per group 32, optimal(importance=hessian)" in done.stdout
    written = yaml.safe_load((out / "recipe.yaml").read_text())
    assert list(written["default_stage"]["default_modifiers"]) == ["GPTQModifier"]
    assert json.loads((out / "calipers.json").read_text())["pipeline"] == "sequential"
    again = ("plan", str(model), "--recipe", str(out / "recipe.yaml"), "--method", "rtn", "--json")
    assert json.loads(run_here(*again).stdout)["needs_data"]  # its observer is named in the file
    refused = run_here("plan", str(model), "--scheme", "W4A16", "--method", "awq")
    assert (refused.exit_code, "--method awq is not allowed" in refused.stderr) == (2, True)
