"""The notebooks of examples/ run from top to bottom, and hold no outputs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest.mock import patch

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))


def test_there_is_one() -> None:
    assert "quickstart.ipynb" in [path.name for path in EXAMPLES]


# What jupyter_client and its loop warn of is none of ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
@pytest.mark.slow
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    settings = {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PATH": programs, "COLUMNS": "80"}
    with patch.dict(os.environ, {**settings, "HF_HUB_OFFLINE": "1"}):
        NotebookClient(notebook, timeout=300, kernel_name="python3").execute(cwd=str(tmp_path))
    shown = [output for cell in cells for output in cell.outputs]
    drawn = [each.data["text/html"] for each in shown if "text/html" in each.get("data", {})]
    assert len(drawn) == 5  # measurements, two checkpoints, a plan, an evaluation
    assert all("<table>" in each and "<svg" in each for each in drawn)
    printed = "".join(each.text for each in shown if each.output_type == "stream")
    assert "bits per quantized weight" in printed
