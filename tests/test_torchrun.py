"""``torchrun`` as users call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from pathlib import Path

import rank_jobs
import torch
from torch import distributed as dist

import calipers

torch.set_num_threads(1)
folder = Path(sys.argv[1])


def run(name):
    data = rank_jobs.texts(40, 128)
    result = calipers.oneshot(
        rank_jobs.llama(), rank_jobs.RECIPES["FP8"], data, output_dir=folder / name,
        num_calibration_samples=40, timeout=rank_jobs.LONG,
    )
    scales = {
        name: value.tolist() for name, value in result.model.state_dict().items()
        if name.endswith("input_scale")
    }
    tokens = result.coverage.tokens
    return {"scales": scales, "tokens": tokens, "initialised": dist.is_initialized()}


found = {"by itself": run("first"), "by itself again": run("second")}
dist.init_process_group("gloo")
found["by the user"] = run("third")
found["rank"], found["world"] = dist.get_rank(), dist.get_world_size()
dist.destroy_process_group()
(folder / f"{found['rank']}.json").write_text(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("torchrun")
    (folder / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error::calipers.errors.CalipersWarning",
    }
    ended = subprocess.run(
        [*torchrun, str(folder / "script.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.fixture
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_all_processes_take_part(found: list[dict[str, Any]]) -> None:
    assert [(rank["rank"], rank["world"]) for rank in found] == [(0, 2), (1, 2)]
    for rank in found:
        for who in ("by itself", "by itself again", "by the user"):
            assert set(rank[who]["tokens"].values()) == {40 * 128}
            assert rank[who]["scales"] == found[0]["by the user"]["scales"]
    assert len(found[0]["by the user"]["scales"]) == 14


def test_a_process_group_ends_with_who_made_it(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert not rank["by itself"]["initialised"]
        assert not rank["by itself again"]["initialised"]
        assert rank["by the user"]["initialised"]


def test_each_checkpoint_is_there_once(folder: Path) -> None:
    folders = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert folders == ["first", "second", "third"]
    for name in folders:
        notes = json.loads((folder / name / "calipers.json").read_text())
        assert (notes["samples"], notes["tokens"]) == (40, 40 * 128)
        assert list((folder / name).glob("*.safetensors"))
