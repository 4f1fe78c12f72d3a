"""What the processes of test_distributed.py do; they import this file by name."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import distributed as dist

from calipers.errors import CalipersError
from calipers.observers import Observer
from calipers.statistics import distributed

INT8 = QuantizationArgs(num_bits=8)
INT4 = QuantizationArgs(num_bits=4, group_size=8)
BATCHES = 6


def batches(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 5, 16, generator=generator).to(dtype) for _ in range(BATCHES)]


def share(rank: int, world: int, idle: int | None = None) -> list[int]:
    """Batches of a rank; an idle one leaves its own to the next."""
    workers = [r for r in range(world) if r != idle]
    return [
        i for i in range(BATCHES) if rank in workers and i % len(workers) == workers.index(rank)
    ]


def build(name: str, args: QuantizationArgs = INT8, base_name: str = "input") -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args)


def sync(observer: Observer) -> int:
    handles = observer.sync_activation_stats()
    for handle in handles:
        handle.wait()
    return len(handles)


def observe(name: str, indices: list[int], dtype: torch.dtype = torch.float32) -> Observer:
    observer = build(name)
    for index in indices:
        observer(batches(dtype)[index])
    return observer


def gather(indices: list[int], dtype: torch.dtype = torch.float32) -> Observer:
    linear = torch.nn.Linear(16, 4)
    observer = build("imatrix_mse", INT4, "weight")
    observer.attach(linear)
    for index in indices:
        linear(batches(dtype)[index].float())
    observer.detach(linear)
    return observer


def gather_hessian(indices: list[int]) -> Observer:
    """Inputs in bfloat16: the products of their few bits add up without rounding."""
    linear = torch.nn.Linear(16, 4)
    observer = Observer.load_from_registry(
        "optimal", base_name="weight", args=INT4, importance="hessian"
    )
    observer.attach(linear)
    for index in indices:
        linear(batches(torch.bfloat16)[index].mul(4).round().div(4).float())
    observer.detach(linear)
    return observer


def weight() -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(2))


# What each rank does; what it returns is compared with one process, or between ranks.


def static_minmax(rank: int, world: int) -> Any:
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        observer = observe("static_minmax", share(rank, world), dtype)
        sync(observer)
        found[dtype] = observer.fields()
    return found


def static_minmax_idle(rank: int, world: int) -> Any:
    observer = observe("static_minmax", share(rank, world, idle=1))
    assert observer.has_statistics == (rank != 1)
    sync(observer)
    return observer.fields() | dict(enumerate(observer))


def value_counts(rank: int, world: int) -> Any:
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        observer = observe("percentile", share(rank, world), dtype)
        sync(observer)
        found[dtype] = observer.fields() | dict(enumerate(observer))
    return found


def value_counts_idle(rank: int, world: int) -> Any:
    observer = observe("entropy", share(rank, world, idle=1))
    sync(observer)
    return observer.fields() | dict(enumerate(observer))


def value_counts_more(rank: int, world: int) -> Any:
    """Data in another dtype between two synchronisations; the last rank sees nothing more."""
    observer = observe("percentile", share(rank, world)[:1], torch.bfloat16)
    sync(observer)
    for index in share(rank, world)[1:] if rank != world - 1 else []:
        observer(batches(torch.bfloat16)[index])(batches(torch.float16)[index])
    sync(observer)
    adopted = build("value_counts").adopt(observer)
    return sync(observer), sync(adopted), adopted.fields(), observer.fields()


def imatrix(rank: int, world: int) -> Any:
    # Inputs in bfloat16: their squares and sums are exact, so that "equal" can mean equal.
    observer = gather(share(rank, world), torch.bfloat16)
    sync(observer)
    return observer(weight()).fields()


def imatrix_idle(rank: int, world: int) -> Any:
    indices = share(rank, world, idle=0)
    observer = gather(indices, torch.bfloat16) if indices else build("imatrix_mse", INT4, "weight")
    sync(observer)
    return observer(weight()).fields()


def hessian(rank: int, world: int) -> Any:
    observer = gather_hessian(share(rank, world))
    sync(observer)
    return observer(weight()).fields()


def hessian_idle(rank: int, world: int) -> Any:
    observer = gather_hessian(share(rank, world, idle=0))
    sync(observer)
    return observer(weight()).fields()


def histogram_mse(rank: int, world: int) -> Any:
    observer = observe("histogram_mse", share(rank, world), torch.bfloat16)
    sync(observer)
    return observer.fields() | dict(enumerate(observer))


def moving_average(rank: int, world: int) -> Any:
    found = {}
    for name in ("minmax", "mse"):
        observer = observe(name, share(rank, world))
        found[name, "before"] = observer.max_vals.clone()
        sync(observer)
        found[name, "after"] = observer.max_vals
    return found


def moving_average_idle(rank: int, world: int) -> Any:
    observer = observe("minmax", share(rank, world, idle=0), torch.bfloat16)
    before = getattr(observer, "max_vals", None)
    sync(observer)
    return {"before": before, "after": observer.max_vals, "scale": next(iter(observer))}


def nobody_saw_anything(_rank: int, _world: int) -> Any:
    observer = build("static_minmax")
    return sync(observer), observer.has_statistics


def memoryless(rank: int, world: int) -> Any:
    observer = observe("memoryless_minmax", share(rank, world))
    before = observer.max_vals.clone()
    return sync(observer), torch.equal(observer.max_vals, before)


def twice(rank: int, world: int) -> Any:
    observer = gather(share(rank, world))
    sync(observer)
    once = observer._imatrix_sum.clone()
    handles = sync(observer)
    return handles, torch.equal(observer._imatrix_sum, once)


def more_after_sync(rank: int, world: int) -> Any:
    indices = share(rank, world)
    found = observe("static_minmax", indices[:1]), gather(indices[:1], torch.bfloat16)
    for observer in found:
        sync(observer)
    # The last rank sees nothing more.
    if rank != world - 1:
        found[0].merge(observe("static_minmax", indices[1:]))
        found[1].merge(gather(indices[1:], torch.bfloat16))
    for observer in found:
        sync(observer)
    return [observer.fields() for observer in found]


def one_starts_anew(rank: int, world: int) -> Any:
    """The first rank forgets what all had in common; the others still bring it in, once."""
    observer = gather(share(rank, world), torch.bfloat16)
    sync(observer)
    if rank == 0:
        observer.reset()
        observer.merge(gather([0], torch.bfloat16))
    sync(observer)
    return observer.fields()


def what_others_hold_stays(rank: int, world: int) -> Any:
    observer = observe("static_minmax", share(rank, world))
    held = observer.max_vals
    before = held.clone()
    sync(observer)
    return torch.equal(held, before)


def different_shapes(rank: int, _world: int) -> Any:
    args = QuantizationArgs(num_bits=8, group_size=8)
    observer = build("static_minmax", args)(torch.ones(2, 8 * (rank + 1)))
    return expect_error(lambda: sync(observer))


def different_configurations(rank: int, _world: int) -> Any:
    observer = build("static_minmax", QuantizationArgs(num_bits=8 - rank))(torch.ones(2, 8))
    return expect_error(lambda: sync(observer))


def different_amounts(rank: int, _world: int) -> Any:
    """Each process gives as many tensors as its number says, so that one gives none."""
    given = [torch.full((1000,), rank, dtype=torch.float8_e4m3fn) for _ in range(rank)]
    found = distributed.gather({("mine", 1): given})
    for other, data in enumerate(found):
        assert all(tensor.float().eq(other).all() for tensor in data["mine", 1])
    return [sum(tensor.numel() for tensor in data["mine", 1]) for data in found]


def expect_error(action: Callable[[], object]) -> str:
    try:
        action()
    except CalipersError as error:
        return str(error)
    return "no error"


SCENARIOS = [
    static_minmax,
    static_minmax_idle,
    value_counts,
    value_counts_idle,
    value_counts_more,
    imatrix,
    imatrix_idle,
    hessian,
    hessian_idle,
    histogram_mse,
    moving_average,
    moving_average_idle,
    nobody_saw_anything,
    memoryless,
    twice,
    more_after_sync,
    one_starts_anew,
    what_others_hold_stays,
    different_shapes,
    different_configurations,
    different_amounts,
]


def run_rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    results: dict[str, Any] = {}
    for scenario in SCENARIOS:
        try:
            results[scenario.__name__] = scenario(rank, world)
        except Exception:
            results[scenario.__name__] = traceback.format_exc()
        dist.barrier()
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
