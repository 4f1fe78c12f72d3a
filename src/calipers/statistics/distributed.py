"""Statistics across ranks: what processes tell each other, and how their statistics become one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch import distributed as dist

from calipers.errors import RankError, different_configurations
from calipers.statistics.base import Reduction, Statistic, full_precision

_STRUCTURE = "structure"
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}
_DTYPES = {name: each for name, each in vars(torch).items() if isinstance(each, torch.dtype)}
_DTYPE_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES.values()}


def gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Give plain data and tensors to all processes, and get what each gave, tensors on the CPU.

    :param group: by which the processes communicate; None for the default one. All are in it
    """
    device = communication_device(group)
    encoded = encode(mine)
    world = dist.get_world_size(group)
    size = torch.tensor([len(encoded)], device=device)
    sizes = [torch.empty_like(size) for _ in range(world)]
    dist.all_gather(sizes, size, group=group)
    longest = int(max(sizes))
    padded = torch.frombuffer(bytearray(encoded.ljust(longest, b"\0")), dtype=torch.uint8)
    received = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(received, padded.to(device), group=group)
    return [
        decode(data[: int(length)].cpu().numpy().tobytes())
        for data, length in zip(received, sizes, strict=True)
    ]


def communication_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return where tensors must be that processes send to each other."""
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def encode(value: Any) -> bytes:
    """Return data as a safetensors file: its tensors, and JSON that says where they belong.

    >>> decode(encode({("a", 1): [None, 0.5, {"b"}]}))
    {('a', 1): [None, 0.5, {'b'}]}
    """
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_taken_apart(value, tensors))
    return save(tensors, {_STRUCTURE: structure})


def decode(data: bytes) -> Any:
    """Return what was encoded."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return _put_together(json.loads(header["__metadata__"][_STRUCTURE]), load(data))


def _taken_apart(value: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON, in which all but plain values are a list: their kind, their parts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        name = str(len(tensors))
        # As bytes, for not all readers of safetensors know all dtypes; in memory of their own, for
        # writers refuse tensors that share it.
        own = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        tensors[name] = own.reshape(-1).view(torch.uint8)
        return ["tensor", [name, _DTYPE_NAMES[value.dtype], list(value.shape)]]
    if isinstance(value, torch.dtype):
        return ["dtype", _DTYPE_NAMES[value]]
    if isinstance(value, dict):
        pairs = [[_taken_apart(each, tensors) for each in pair] for pair in value.items()]
        return ["dict", pairs]
    for name, kind in _SEQUENCES.items():
        if type(value) is kind:
            return [name, [_taken_apart(each, tensors) for each in value]]
    raise TypeError(f"processes cannot exchange a {type(value).__name__}")


def _put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, parts = value
    if kind == "tensor":
        name, dtype, shape = parts
        return tensors[name].view(_DTYPES[dtype]).reshape(shape)
    if kind == "dtype":
        return _DTYPES[parts]
    if kind == "dict":
        return {_put_together(key, tensors): _put_together(each, tensors) for key, each in parts}
    return _SEQUENCES[kind](_put_together(part, tensors) for part in parts)


def sync_statistics(
    statistics: Sequence[Statistic], group: dist.ProcessGroup | None = None
) -> list[dist.Work]:
    """Start reducing the statistics over all ranks, and return the handles to wait for.

    Every rank calls this with the same statistics in the same order. Ranks first tell each other
    what they hold: one that has seen nothing joins with values that change nothing, and afterwards
    holds what the others do. It may be called again after more data, which then counts once; with
    nothing new, or without other ranks, there is nothing to do.

    :param group: by which the ranks communicate; None for the default one. All ranks are in it
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return []
    holdings: list[dict[str, Any]] = []
    for statistic in statistics:
        fields, synced = statistic.fields(), statistic.synced
        holdings.append(
            {
                "configuration": statistic.configuration(),
                "fields": {name: (tuple(v.shape), v.dtype) for name, v in fields.items()},
                "synced": bool(synced),
                "unchanged": all(fields.get(name) is synced[name] for name in synced),
            }
        )
    everyone = gather(holdings, group)
    works: list[dist.Work] = []
    for position, statistic in enumerate(statistics):
        with statistic.lock, full_precision():
            works += _reduce_fields(statistic, [rank[position] for rank in everyone], group)
    return works


def _reduce_fields(
    statistic: Statistic, ranks: list[dict[str, Any]], group: dist.ProcessGroup | None
) -> list[dist.Work]:
    if all(held["synced"] and held["unchanged"] for held in ranks):
        return []
    for held in ranks:
        if held["configuration"] != ranks[0]["configuration"]:
            action = f"synchronise {statistic.label()}"
            raise different_configurations(action, ranks[0]["configuration"], held["configuration"])
    works = []
    device = communication_device(group)
    for name, reduction in statistic.declared().items():
        held_by = [held["fields"][name] for held in ranks if name in held["fields"]]
        if not held_by or not reduction.is_synced:
            continue
        shapes = {shape for shape, _ in held_by}
        if len(shapes) > 1:
            raise RankError(
                f"Cannot synchronise {statistic.label()}: ranks hold '{name}' with shapes "
                f"{sorted(shapes)}",
                hint="Every rank must observe the same module",
            )
        dtype = reduce(torch.promote_types, (dtype for _, dtype in held_by))
        if name in statistic.fields():
            share = _share(statistic, name, reduction, ranks).to(dtype)
        else:
            share = reduction.identity(shapes.pop(), dtype, device)
        if share.device.type == "cpu":
            share = share.to(device)
        setattr(statistic, name, share)
        statistic.synced[name] = share
        works.append(dist.all_reduce(share, op=_OPS[reduction], group=group, async_op=True))
    return works


def _share(
    statistic: Statistic, name: str, reduction: Reduction, ranks: list[dict[str, Any]]
) -> Tensor:
    """Return what this rank brings into the reduction, in memory of its own."""
    mine: Tensor = getattr(statistic, name)
    if reduction is Reduction.MEAN:
        # A mean over those who have one; a backend's AVG would count the others too.
        return mine / sum(name in held["fields"] for held in ranks)
    if reduction is Reduction.SUM and name in statistic.synced:
        # What an earlier synchronisation made common is brought in by one rank, not by all.
        keeper = next(rank for rank, held in enumerate(ranks) if held["synced"])
        if dist.get_rank() != keeper:
            return mine - statistic.synced[name].to(mine.device)
    return mine.clone(memory_format=torch.contiguous_format)


_OPS = {
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MEAN: dist.ReduceOp.SUM,
}
