"""How the processes of calibration/test_distributed.py are started, and what they bring back."""

from __future__ import annotations

import os
import socket
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import multiprocessing

BOUND = 150  # seconds, for a machine with much else to do


def distributed_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def run_jobs(
    rank: int, world: int, folder: str, jobs: list[Any], store: str, environment: dict[str, str]
) -> None:
    torch.set_num_threads(1)
    os.environ |= environment
    if world > 1 and not environment:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    results: dict[str, Any] = {}
    for job in jobs:
        name = getattr(job, "func", job).__name__
        try:
            results[name] = job(Path(folder))
        except Exception:
            results[name] = traceback.format_exc()
            break
    torch.save(results, Path(folder) / f"{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def ready_context() -> Any:
    """Return what starts processes: a server that has imported everything forks them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_jobs", "rank_failures", "ranks"])
    with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):
        forkserver.ensure_running()
    return context


def run(
    world: int,
    folder: Path,
    jobs: list[Any],
    store: str | None = None,
    environments: list[dict[str, str]] | None = None,
) -> list[Any]:
    """Run jobs in several processes; None for one that did not come back.

    With environments, which a launcher would give them, they have to find each other themselves.
    """
    store = store or f"file://{folder}/store"
    context = ready_context()
    processes = [
        context.Process(target=run_jobs, args=(rank, world, str(folder), jobs, store, given))
        for rank, given in enumerate(environments or [{}] * world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(BOUND)
        assert not any(process.is_alive() for process in processes), "a process hangs"
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"{rank}.pt" for rank in range(world)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]
