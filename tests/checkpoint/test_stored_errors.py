"""Errors that are told are those of the codes that are stored, also of 8 bits in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationScheme
from quantizing import IDS, model_folder, modifier
from safetensors.torch import load_file

import calipers

SCHEMES = ("W8A8", "W8A16", "W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4")
pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("stored") / "model", dtype=request.param)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_without_data(scheme: str, model: Path, tmp_path: Path) -> None:
    size = {"group_size": 32} if scheme.startswith("W4") else {}
    given = [modifier(scheme)]
    found = calipers.quantize(model, given, output_dir=tmp_path / "out", progress=False, **size)
    check(found.errors, model, tmp_path / "out")


@pytest.mark.parametrize("gptq", [False, True])
def test_with_data(gptq: bool, model: Path, tmp_path: Path) -> None:
    given = [modifier("W8A8", gptq=gptq)]
    found = calipers.oneshot(model, given, IDS, output_dir=tmp_path / "out", progress=False)
    check(found.errors, model, tmp_path / "out")


def check(errors: dict[str, float], model: Path, folder: Path) -> None:
    """Compare with what compressed-tensors decompresses, its product not rounded."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme.model_validate(group)
    form = CompressionFormat(scheme.format or config["format"])
    compressor = BaseCompressor.get_value_from_registry(form.value)
    before = load_file(model / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    assert len(errors) == 14
    for name, error in errors.items():
        parts = {key.removeprefix(f"{name}."): stored[key] for key in stored if name in key}
        if parts["weight_scale"].dtype != torch.uint8:
            parts["weight_scale"] = parts["weight_scale"].float()
        after = compressor.decompress(parts, scheme)["weight"].double()
        exact = before[f"{name}.weight"].double()
        expected = float((after - exact).norm() / exact.norm())
        assert error == pytest.approx(expected, rel=1e-5), name
