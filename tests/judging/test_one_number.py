"""What a module loses is one number, whoever tells it, and the one that brute force finds."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from quantizing import model_folder, modifier
from safetensors.torch import load_file
from typer.testing import CliRunner

import calipers
from calipers.cli.app import app
from calipers.measurements import Measurements
from calipers.planning.measuring import HESSIAN
from calipers.planning.specs import COUNTS, SQUARES

IDS = torch.randint(48, (32, 128), generator=torch.Generator().manual_seed(5))
INT4 = QuantizationArgs(num_bits=4, strategy="group", group_size=32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("one") / "model")


def stored_weight(folder: Path, name: str) -> torch.Tensor:
    """Codes times scales in float64, unpacked by compressed-tensors."""
    tensors = load_file(folder / "model.safetensors")
    state = {
        key.removeprefix(f"{name}."): each
        for key, each in tensors.items()
        if key.startswith(f"{name}.")
    }
    state["weight_scale"] = state["weight_scale"].double()
    scheme = QuantizationScheme(targets=["Linear"], weights=INT4)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    weight: torch.Tensor = compressor.decompress(state, scheme)["weight"]
    return weight.double()


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_everybody_tells_the_same(method: str, model: Path, tmp_path: Path) -> None:
    collect = "hessian" if method == "gptq" else "outputs"
    seen = calipers.measure(model, IDS, collect=collect, num_samples=len(IDS), progress=False)
    folder = tmp_path / "out"
    solver = {"name": "optimal", "importance": "hessian" if method == "gptq" else "imatrix"}
    done = calipers.quantize(
        model,
        [modifier("W4A16")],
        seen,
        folder,
        method=method,
        weight_observer=solver,
        group_size=32,
        progress=False,
    )
    weights, outputs = brute_force(model, folder, seen, list(done.errors))

    assert dict(done.errors) == pytest.approx(weights, rel=1e-5)
    errors = {name: cost.output_error for name, cost in done.costs.items()}
    # Errors that are fed back cancel in the output, and those of single precision do not.
    assert errors == pytest.approx(outputs, rel=1e-4)

    shown = json.loads(CliRunner().invoke(app, ["show", str(folder), "--json"]).stdout)
    assert {loss["module"]: loss["error"] for loss in shown["losses"]} == errors
    for loss in shown["losses"]:
        assert loss["decibels"] == pytest.approx(20 * math.log10(outputs[loss["module"]]), rel=1e-4)

    linted = {each.name: each.error for each in calipers.lint(folder, model).weights}
    assert linted == pytest.approx(dict(done.errors), rel=1e-6)

    (facts,) = calipers.report(folder, seen, source=model).content.checkpoints
    assert {row.name: row.output_error for row in facts.ranked} == errors
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "calipers.json").unlink()
    (facts,) = calipers.report(bare, seen, source=model).content.checkpoints
    assert {row.name: row.output_error for row in facts.ranked} == pytest.approx(errors, rel=1e-6)
    assert {row.name: row.weight_error for row in facts.ranked} == pytest.approx(
        dict(done.errors), rel=1e-6
    )

    advised = calipers.advise(
        model, seen, "W4A16", methods=method, solvers=[solver], group_size=32, progress=False
    )
    assert {each.module: each.error for each in advised.predictions} == pytest.approx(errors)


def brute_force(
    model: Path, folder: Path, seen: Measurements, names: list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """‖ΔW‖ / ‖W‖ and √(E‖ΔW x‖² / E‖y‖²) of each module, in float64, from its files."""
    originals, tensors = load_file(model / "model.safetensors"), seen.tensors()
    weights, outputs = {}, {}
    for name in names:
        weight = originals[f"{name}.weight"].double()
        lost = stored_weight(folder, name) - weight
        weights[name] = float(lost.norm() / weight.norm())
        inputs: Any = tensors[name, "input"]
        if HESSIAN in inputs:
            hessian = inputs[HESSIAN]._hessian_sum[0]
            energy, whole = (torch.trace(each @ hessian @ each.T) for each in (lost, weight))
        else:
            energy = (lost.square() * inputs[SQUARES]._imatrix_sum).sum()
            counts: Any = tensors[name, "output"][COUNTS]
            whole = counts.square_sum()
        outputs[name] = math.sqrt(energy / whole)
    return weights, outputs
