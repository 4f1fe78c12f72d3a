"""A process that is killed under ``torchrun``: the others say who it was, and leave nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import os, signal, sys, time

import rank_jobs

from calipers import errors
from calipers.engine import oneshot as entrypoint
from calipers.calibration import pipelines

call, calls = pipelines.call_model, []


def slowly(*args, **kwargs):
    calls.append(0)
    if len(calls) == 2 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)
    return call(*args, **kwargs)


pipelines.call_model = slowly
try:
    entrypoint.oneshot(
        rank_jobs.llama(), rank_jobs.RECIPES["FP8"], rank_jobs.texts(3000),
        num_calibration_samples=3000, output_dir=sys.argv[1],
    )
except errors.CalipersError as error:
    handler = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os.write(1, f"{error.exit_code} {handler} {error}\\n".encode())  # in one piece
    sys.exit(error.exit_code)
"""


def test_the_others_say_which_rank_is_gone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "place").mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    ended = subprocess.run(
        [*torchrun, str(tmp_path / "script.py"), str(tmp_path / "place" / "out")],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    said = sorted(line for line in ended.stdout.splitlines() if "told to stop" in line)
    for rank, line in zip((0, 2), said, strict=True):
        assert re.fullmatch(
            rf"6 True Rank {rank} was told to stop \(SIGTERM\) while calibrating the model, and "
            r"rank 1 \(process \d+ on \S+\) is gone: it crashed or was killed, perhaps for want of "
            r"memory\. Look at its output\. Nothing half-written is left\.",
            line,
        )
    assert os.listdir(tmp_path / "place") == []
