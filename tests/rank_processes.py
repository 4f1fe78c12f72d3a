"""How the processes of calibration/test_distributed.py are started, and what they bring back."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Collection
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
    rank: int,
    world: int,
    folder: str,
    jobs: list[Any],
    store: str,
    environment: dict[str, str],
    said: str,
) -> None:
    with open(said, "w") as stderr:
        os.dup2(stderr.fileno(), 2)
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
    result = Path(folder) / f"{rank}.pt"
    torch.save(results, result.with_suffix(".part.pt"))
    result.with_suffix(".part.pt").rename(result)  # whole, or not there
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
    expected_to_die: Collection[int] = (),
) -> list[Any]:
    """Run jobs in several processes; None for one that is expected to die.

    With environments, which a launcher would give them, they have to find each other themselves.
    """
    store = store or f"file://{folder}/store"
    with tempfile.TemporaryDirectory() as said:
        given = environments or [{}] * world
        outputs = [Path(said) / f"{rank}.txt" for rank in range(world)]
        arguments = [
            (rank, world, str(folder), jobs, store, given[rank], str(outputs[rank]))
            for rank in range(world)
        ]
        codes = run_processes(arguments)
        for rank, code in enumerate(codes):
            if rank not in expected_to_die and not (folder / f"{rank}.pt").exists():
                raise AssertionError(
                    f"Rank {rank} ended with code {code} before its result was written. "
                    f"It said:\n{outputs[rank].read_text() if outputs[rank].exists() else ''}"
                )
    files = [folder / f"{rank}.pt" for rank in range(world)]
    return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def run_processes(arguments: list[tuple[Any, ...]]) -> list[int | None]:
    """Run the jobs of each process, and return the codes they end with."""
    context = ready_context()
    processes = [context.Process(target=run_jobs, args=each) for each in arguments]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(BOUND)
        assert not any(process.is_alive() for process in processes), "a process hangs"
    finally:
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes]
