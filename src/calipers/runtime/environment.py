"""What surrounds this process: those that a launcher started with it, and the hub."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from calipers.errors import ConfigurationError


@dataclass(frozen=True)
class Launch:
    """This process among those that were started with it.

    :param launcher: what started them; None if nothing says that there are others
    :param local_rank: its number on its machine, if the launcher tells
    """

    launcher: str | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None


# RANK and WORLD_SIZE come first: torchrun sets them, and users who want something else than srun
# and mpirun tell. Slurm's count is that of the step, where it is known. The count of the allocation
# counts only beside a number: a process of srun in a container that hides the step has both, and so
# has the script of sbatch, which is alone, but cannot be told from it.
_ALLOCATION = "Slurm"
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    _ALLOCATION: ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpirun (MPICH)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "mpirun (MVAPICH)": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
    ),
}
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_MEANINGS = {
    "MASTER_ADDR": "MASTER_ADDR (the machine of rank 0)",
    "MASTER_PORT": "MASTER_PORT (a free port there)",
    "RANK": "RANK (the number of the process, from 0)",
    "WORLD_SIZE": "WORLD_SIZE (how many processes there are)",
}


def find_launch(environment: Mapping[str, str] | None = None) -> Launch:
    """Read from the environment who else was started; the first launcher that says so counts."""
    given = os.environ if environment is None else environment
    for launcher, (rank, size, local_rank) in _LAUNCHERS.items():
        if launcher == "torchrun" and size not in given and _number(given, rank):
            raise _cannot_find_others(f"{rank}={given[rank]} is set, but {size} is not", [size])
        if launcher == _ALLOCATION and rank not in given:
            continue
        if size not in given:
            continue
        world_size = _number(given, size)
        if world_size == 1:
            return Launch()
        if rank not in given:
            raise _cannot_find_others(f"{size}={world_size} is set, but {rank} is not", [rank])
        number = _number(given, rank)
        if not 0 <= number < world_size:
            raise _cannot_find_others(f"{rank}={number} is not below {size}={world_size}", [rank])
        local = _number(given, local_rank) if local_rank in given else None
        return Launch(launcher, number, world_size, local)
    return Launch()


def is_first_process() -> bool:
    """Whether this process speaks for all that were started together."""
    try:
        return find_launch().rank == 0
    except ConfigurationError:  # who needs the others says so
        return True


def check_address(launch: Launch, environment: Mapping[str, str] | None = None) -> None:
    """Refuse processes that cannot find each other: each would do the whole work."""
    given = os.environ if environment is None else environment
    missing = [name for name in _ADDRESS if not given.get(name)]
    if launch.launcher is not None and missing:
        found = f"{launch.launcher} started {launch.world_size} processes"
        if launch.launcher in ("torchrun", _ALLOCATION):
            rank, size, _ = _LAUNCHERS[launch.launcher]
            found = f"{rank}={launch.rank} and {size}={launch.world_size} are there"
        are = "is" if len(missing) == 1 else "are"
        raise _cannot_find_others(f"{found}, but {' and '.join(missing)} {are} not set", missing)


def _number(given: Mapping[str, str], name: str) -> int:
    try:
        return int(given.get(name, "0"))
    except ValueError:
        raise _cannot_find_others(f"{name}={given[name]!r} is no number", [name]) from None


def _cannot_find_others(problem: str, missing: Sequence[str]) -> ConfigurationError:
    wanted = " and ".join(_MEANINGS.get(name, name) for name in missing)
    return ConfigurationError(
        f"{problem}, so this process cannot find the others of its job, and each would do all the "
        "work",
        hint=f"Start them with torchrun, or set {wanted} for all of them. If every process is "
        "meant to work for itself, or this is the only one, as in a shell of salloc or sbatch, set "
        "WORLD_SIZE=1",
    )


PATIENCE = 3.0
"""How many seconds the hub has to answer at all."""


def hub_answers() -> bool:
    """Whether the hub is there; libraries try again for half a minute before they say no.

    Looking up its address, which knows no limit of its own, is part of the waiting.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
        except Exception:  # whatever it was: nobody has answered
            return
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(PATIENCE)
