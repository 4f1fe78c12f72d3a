"""How a process finds the others of its job."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from calipers.errors import RankError, first_line
from calipers.runtime.distributed import DEFAULT_TIMEOUT, DistributedRanks
from calipers.runtime.launch import Launch, check_address, find_launch
from calipers.runtime.ranks import Ranks, SingleProcess, ranks_in_use

_worlds = itertools.count()  # all processes count alike


@contextmanager
def joined_ranks(timeout: timedelta | None = None) -> Iterator[Ranks]:
    """Join the job that ``use_ranks`` or a launcher gives to this process; else it is alone.

    :param timeout: how long a process that gives no sign of life is waited for
    """
    given = ranks_in_use()
    if given is not None:
        yield given
        return
    own_group = join_processes(timeout or DEFAULT_TIMEOUT)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        with DistributedRanks(timeout, owns_group=own_group) as ranks:
            yield ranks
    else:
        yield SingleProcess()


def join_processes(timeout: timedelta = DEFAULT_TIMEOUT) -> bool:
    """Join the other processes of the job; False if there are none, or it is done.

    Where there are accelerators, the process takes the one with its local number.
    """
    if not dist.is_available() or dist.is_initialized():
        return False
    launch = find_launch()
    if launch.world_size == 1:
        return False
    check_address(launch)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None:
        local_rank = launch.rank if launch.local_rank is None else launch.local_rank
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
    backend = dist.get_default_backend_for_device(device or "cpu")
    # Under keys of its own: what other groups, before or after, leave in the store is not read.
    prefix = f"calipers/world/{next(_worlds)}"
    dist.init_process_group(
        backend,
        store=PrefixStore(prefix, _store_of(launch, timeout)),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    return True


@cache
def _store_of(launch: Launch, timeout: timedelta) -> Any:
    """Return the store of a launch, the same for all jobs of this process.

    Without torchrun the first process hosts it: were it made anew for each job, another one that is
    quicker would find the old one, which is about to go.
    """
    try:
        return next(rendezvous("env://", launch.rank, launch.world_size, timeout=timeout))[0]
    except RuntimeError as error:
        raise RankError(
            f"has not found the others of {launch.world_size} processes within "
            f"{timeout.total_seconds():g} s: {first_line(str(error))}",
            subject=f"Rank {launch.rank}",
            hint="Start all of them at about the same time, with the same MASTER_ADDR and "
            "MASTER_PORT. If this one is meant to work for itself, set WORLD_SIZE=1",
        ) from error
