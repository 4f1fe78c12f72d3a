"""Wheels as pip builds them where the native kernels are not wanted, or cannot be built."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
WITHOUT = "Calipers is built WITHOUT native kernels: they failed to build."
ASKED = "Calipers is built without native kernels, because of CALIPERS_NATIVE=0."


def build(folder: Path, **environment: str) -> tuple[list[str], str]:
    """Build a wheel, and return the names of its files and what pip had to say."""
    env = {key: value for key, value in os.environ.items() if key != "CALIPERS_NATIVE"}
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "-w", str(folder)]
    command += [f"--config-settings=build-dir={folder}/objects", str(ROOT)]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**env, **environment}
    )
    said = result.stdout + result.stderr
    if "No matching distribution found" in said or "Could not find a version" in said:
        pytest.skip("the build requirements cannot be fetched here")
    assert result.returncode == 0, said
    (wheel,) = folder.glob("*.whl")
    return [wheel.name, *zipfile.ZipFile(wheel).namelist()], said


@pytest.mark.parametrize(
    ("environment", "message"),
    [({"CALIPERS_NATIVE": "0"}, ASKED), ({"CXX": "/bin/false"}, WITHOUT)],
    ids=["asked", "no_compiler"],
)
def test_without_native_kernels(tmp_path: Path, environment: dict[str, str], message: str) -> None:
    names, said = build(tmp_path, **environment)
    assert names[0].endswith("-py3-none-any.whl")
    assert "calipers/kernels/search.py" in names
    assets = {"page.html", "page.js", "page.css", "plotly-cartesian.min.js", "plotly-LICENSE.txt"}
    assert {f"calipers/reporting/assets/{name}" for name in assets} <= set(names)
    assert {"calipers/demo/model/model.safetensors", "calipers/cli/main.py"} <= set(names)
    assert not [name for name in names if name.endswith(".so")]
    assert message in said
