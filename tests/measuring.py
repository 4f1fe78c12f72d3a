"""What two measurements have in common, and what processes measure together."""

from __future__ import annotations

from pathlib import Path

import rank_jobs
import rank_processes
import torch

import calipers
from calipers import Measurements
from calipers.statistics.base import Statistic


def assert_same(one: Measurements, other: Measurements) -> None:
    """Assert that integers and extrema are equal, and sums but for the order of additions."""
    assert one.info == other.info
    ours, theirs = one.tensors(), other.tensors()
    assert ours.keys() == theirs.keys()
    for place, statistics in ours.items():
        assert statistics.keys() == theirs[place].keys()
        for key, each in statistics.items():
            _assert_same_fields(each, theirs[place][key])


def _assert_same_fields(one: Statistic, other: Statistic) -> None:
    ours, theirs = one.fields(), other.fields()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if name.endswith("_sum"):
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)
        else:
            assert value.dtype == theirs[name].dtype
            assert torch.equal(value, theirs[name]), (one.label(), name)


def measure_experts(folder: Path) -> str:
    """Measure a model of whose experts each process sees others; imported by name."""
    rank = rank_processes.distributed_rank()
    found = calipers.measure(
        rank_jobs.routed_mixtral(),
        rank_jobs.routed_texts(0, 1, 2, 0, 1),  # nobody sees the fourth
        collect=("hessian", "outputs"),
        output_file=folder / "output.safetensors",
        progress=False,
        timeout=rank_jobs.LONG,
    )
    return str(found.save(folder / f"{rank}.safetensors"))


def measure_sensitivity(folder: Path) -> dict[str, str]:
    """Measure gradients over as many samples as there are, or one, which one process has."""
    rank = rank_processes.distributed_rank()
    return {
        str(count): str(
            calipers.measure(
                rank_jobs.llama(torch.float32),
                rank_jobs.texts(count),
                collect="sensitivity",
                progress=False,
                timeout=rank_jobs.LONG,
            ).save(folder / f"{count}-{rank}.safetensors")
        )
        for count in (5, 1)
    }
