"""What ``calipers schemes`` tells about presets."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from shell import run, run_here

import calipers
from calipers.engine.presets import RUNS, runs_on, scheme_runs_on
from calipers.planning.specs import regrouped
from calipers.steps.choices import PRESETS, preset


@pytest.fixture(scope="module")
def presets() -> dict[str, dict[str, object]]:
    listed = json.loads(run_here("schemes", "--json").stdout)
    return {each["name"]: each for each in listed}


def test_every_preset_is_listed_with_its_use(presets: dict[str, dict[str, object]]) -> None:
    assert presets.keys() == PRESETS.keys()
    assert [name for name, each in presets.items() if not each["when"]] == []


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("W4A16", 4 + 16 / 128),
        ("W4A16_ASYM", 4 + (16 + 4) / 128),
        ("W3A16", 3 + 16 / 128),
        ("W8A8", 8 + 16 / 4096),
        ("W4A8", 8 + 16 / 128),
        ("FP8", 8),
        ("NVFP4", 4 + 8 / 16),
        ("MXFP4A16", 4 + 8 / 32),
        ("UNQUANTIZED", 16),
    ],
)
def test_bits_count_the_scales(
    name: str, bits: float, presets: dict[str, dict[str, object]]
) -> None:
    # What is left is the shape or the global scale of the whole weight.
    assert presets[name]["bits"] == pytest.approx(bits, abs=2e-5)


def test_what_is_said_comes_from_the_scheme(presets: dict[str, dict[str, object]]) -> None:
    needing = {name for name, each in presets.items() if each["needs_data"]}
    assert needing == {"FP8", "NVFP4", "W8A8_STATIC"}
    told = presets["FP8_BLOCK"]
    assert told["weights"] == "float8, block 128x128"
    assert told["activations"] == "float8, group 128, dynamic"


def test_where_a_scheme_runs(presets: dict[str, dict[str, Any]]) -> None:
    assert all(schemes.keys() <= PRESETS.keys() for schemes in RUNS.values())
    assert "vllm-cpu" not in presets["W8A16"]["runs_on"] | presets["NVFP4A16"]["runs_on"]
    assert presets["W4A16"]["runs_on"].keys() == RUNS.keys()
    for name, each in presets.items():  # whatever its groups and observers are
        scheme = preset(name, ("Linear",))
        if name != "UNQUANTIZED":
            scheme.weights.observer = "mse"
            assert scheme_runs_on(scheme) == each["runs_on"]
    assert scheme_runs_on(regrouped(preset("W8A16", ("Linear",)), 32)) == runs_on("W8A16")
    scheme.weights.symmetric = False
    assert scheme_runs_on(scheme) == {}


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"UNQUANTIZED"}))
def test_the_recipe_shown_means_the_preset(
    name: str, presets: dict[str, dict[str, object]]
) -> None:
    (modifier,) = calipers.load_recipe(presets[name]["recipe"]).modifiers
    scheme = preset(name, ("Linear",))
    assert modifier.weights == scheme.weights
    assert modifier.input_activations == scheme.input_activations


def test_the_command() -> None:
    done = run("schemes", "nvfp4")
    assert (done.returncode, done.stderr) == (0, "")
    assert "4.5 per weight, scales included" in done.stdout
    assert yaml.safe_load(done.stdout.partition("--recipe:")[2])
    listed = run_here("schemes").stdout.splitlines()
    row = next(line.split() for line in listed if line.split()[:1] == ["W8A16"])
    assert row[1:7] == ["int8,", "group", "128", "–", "8.125", "no"]
    wrong = run_here("schemes", "W4A61")
    assert wrong.exit_code == 2
    assert "Did you mean 'W4A16'?" in wrong.stderr
