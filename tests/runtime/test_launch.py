"""Who else was started: torchrun, srun and mpirun are understood, or refused with a way out."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import rank_jobs
import rank_processes
import torch

from calipers import oneshot
from calipers.errors import ConfigurationError, RankError
from calipers.runtime.environment import Launch, check_address, find_launch

ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
SRUN = {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_LOCALID": "0"}
ALLOCATION = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({}, Launch()),
        ({"RANK": "0"}, Launch()),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Launch()),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, Launch("torchrun", 1, 2, 1)),
        (SRUN, Launch("srun", 2, 3, 0)),
        (OPEN_MPI, Launch("mpirun", 1, 2)),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, Launch("mpirun (MPICH)", 0, 4)),
        # only the allocation is known: one of its processes, the only one, and the shell of salloc
        ({**ALLOCATION, "SLURM_LOCALID": "1"}, Launch("Slurm", 1, 2, 1)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, Launch()),
        (ALLOCATION | {"WORLD_SIZE": "1"}, Launch()),
        # torchrun within srun; srun of one task; shells of salloc and sbatch; said to be alone
        (SRUN | {"RANK": "5", "WORLD_SIZE": "6"}, Launch("torchrun", 5, 6)),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"}, Launch()),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}, Launch()),
        (SRUN | {"WORLD_SIZE": "1"}, Launch()),
        (OPEN_MPI | {"WORLD_SIZE": "1", "RANK": "3"}, Launch()),
    ],
)
def test_the_environment_is_read(environment: dict[str, str], found: Launch) -> None:
    assert find_launch(environment) == found


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (SRUN, "^srun started 3 processes, but MASTER_ADDR and MASTER_PORT are not set, so this "),
        (
            OPEN_MPI | {"MASTER_ADDR": "a"},
            r"mpirun started 2 processes, but MASTER_PORT is not set, so",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2"},
            r"^RANK=1 and WORLD_SIZE=2 are there, but MASTER_ADDR and MASTER_PORT are not set, .*"
            r"Start them with torchrun, or set MASTER_ADDR \(the machine of rank 0\) and "
            r"MASTER_PORT \(a free port there\) for all of them\. If every process is meant to "
            r"work for itself, or this is the only one, as in a shell of salloc or sbatch, set "
            r"WORLD_SIZE=1\.",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
            r"^SLURM_PROCID=0 and SLURM_NTASKS=8 are there, but MASTER_ADDR and MASTER_PORT are ",
        ),
        ({"WORLD_SIZE": "2", **ADDRESS}, "WORLD_SIZE=2 is set, but RANK is not, so .* set RANK "),
        ({"RANK": "2", **ADDRESS}, "RANK=2 is set, but WORLD_SIZE is not, so"),
        ({"RANK": "2", "WORLD_SIZE": "2", **ADDRESS}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two' is no number"),
    ],
)
def test_processes_that_cannot_meet_are_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        check_address(find_launch(environment), environment)
    assert caught.value.exit_code == 2


def test_nothing_is_written_then(tmp_path: Path) -> None:
    with (
        mock.patch.dict(os.environ, SRUN),
        pytest.raises(ConfigurationError, match="srun started 3"),
    ):
        oneshot(rank_jobs.llama(torch.float32), "W8A16", output_dir=tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_others_that_do_not_come(tmp_path: Path) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rank_processes.free_port())}
    said = r"^Rank 0 has not found the others of 2 processes within 1 s: .*set WORLD_SIZE=1\."
    with (
        mock.patch.dict(os.environ, address | {"RANK": "0", "WORLD_SIZE": "2"}),
        pytest.raises(RankError, match=said),
    ):
        oneshot(
            rank_jobs.llama(torch.float32),
            "W8A16",
            output_dir=tmp_path / "out",
            timeout=timedelta(seconds=1),
        )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("count", ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"])
@pytest.mark.slow
def test_processes_of_any_launcher_do_one_job(count: str, tmp_path: Path) -> None:
    """Two processes that srun might have started: they share the work, and one writes."""
    environments = [
        {"SLURM_PROCID": str(rank), count: "2", "SLURM_LOCALID": str(rank)}
        | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for port in [rank_processes.free_port()]
        for rank in range(2)
    ]
    found = rank_processes.run(2, tmp_path, [rank_jobs.one_writer], environments=environments)
    for rank, result in enumerate(found):
        assert result["one_writer"]["written"] == (rank == 0)
        assert result["one_writer"]["notes"] == {"samples": 7, "tokens": 7 * 16}
        assert result["one_writer"]["again"]["error"] == "CheckpointExistsError"
