from __future__ import annotations

import pytest
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
