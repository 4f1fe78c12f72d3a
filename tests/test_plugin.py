"""The package of examples/plugin, built, installed and used as a person would."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from shell import run

from calipers.demo import MODEL

PLUGIN = Path(__file__).parent.parent / "examples" / "plugin"
DOWN = "model.layers.0.mlp.down_proj.weight"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = shutil.copytree(PLUGIN, tmp_path_factory.mktemp("source") / "plugin")
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    command += ["--no-index", "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_the_observer_is_listed_and_described(site: Path) -> None:
    done = run("observers", "--json", env={"PYTHONPATH": str(site)})
    assert (done.returncode, done.stderr) == (0, "")
    told = {each["name"]: each for each in json.loads(done.stdout)}
    assert told["headroom"]["does"] == "Takes the extrema of all tensors and leaves some room."
    assert told["headroom"]["merges"].startswith("yes")
    assert "headroom" not in run("observers").stdout


def test_a_recipe_names_both(site: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    recipe = str(PLUGIN / "recipe.yaml")
    command = [
        "quantize",
        "demo",
        "--recipe",
        recipe,
        "--data",
        "demo",
        "--samples",
        "4",
        "-o",
        str(output),
        "--json",
    ]
    done = run(*command, env={"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    weight = load_file(MODEL / "model.safetensors")[DOWN].float()
    kept = weight.abs().flatten().sort().values[round(0.999 * weight.numel()) - 1]
    groups = weight.clamp(-kept, kept).unflatten(1, (-1, 128)).abs().amax(-1)
    scale = load_file(output / "model.safetensors")[f"{DOWN}_scale"].float()
    assert scale.shape == groups.shape
    assert float((scale / (groups * 1.02 / 7.5) - 1).abs().max()) < 0.01
    refused = run(*command, "--overwrite")
    assert "unknown modifier 'ClipWeights'" in refused.stderr
