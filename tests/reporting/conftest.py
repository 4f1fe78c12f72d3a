from __future__ import annotations

from pathlib import Path

import massive
import pytest
import torch
from families import saved
from quantizing import model_folder, modifier
from report_content import IDS, Made

import calipers


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("report")
    model, file = model_folder(folder / "model"), folder / "m.safetensors"
    calipers.measure(
        model, IDS, collect="outputs", output_file=file, num_samples=len(IDS), progress=False
    )
    for name, scheme in (("plain", "W4A16"), ("static", "W8A8_STATIC")):
        options = {"group_size": 32} if name == "plain" else {}
        recipe = [modifier(scheme)]
        calipers.quantize(model, recipe, file, folder / name, progress=False, **options)
    return Made(model, file, folder / "plain", folder / "static")


@pytest.fixture(scope="session")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model with massive activations that were quantized to static int8."""
    folder = tmp_path_factory.mktemp("massive")
    model = saved(massive.massive_llama(torch.bfloat16), folder / "model")
    ids = massive.samples(60, 127)
    seen = calipers.measure(model, ids, num_samples=len(ids), progress=False)
    with pytest.warns(calipers.CalipersWarning, match="1 static activation loses more than 20%"):
        calipers.quantize(model, "W8A8_STATIC", seen, folder / "static", progress=False)
    file = folder / "report.html"
    calipers.report(folder / "static", seen, file, source=model)
    return file
