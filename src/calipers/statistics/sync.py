"""Synchronisation across ranks: afterwards each rank holds the statistics of all data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from calipers.errors import RankError, different_configurations
from calipers.statistics.base import Reduction, Statistic
from calipers.statistics.communication import communication_device, gather
from calipers.statistics.locking import full_precision


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
    everyone = gather([_holdings(statistic) for statistic in statistics], group)
    return [
        work
        for position, statistic in enumerate(statistics)
        for work in _sync_one(statistic, [rank[position] for rank in everyone], group)
    ]


def _holdings(statistic: Statistic) -> dict[str, Any]:
    fields = statistic.fields()
    synced = statistic.synced
    return {
        "configuration": statistic.configuration(),
        "fields": {name: (tuple(value.shape), value.dtype) for name, value in fields.items()},
        "synced": bool(synced),
        "unchanged": all(fields.get(name) is synced[name] for name in synced),
    }


def _sync_one(
    statistic: Statistic, ranks: list[dict[str, Any]], group: dist.ProcessGroup | None
) -> list[dist.Work]:
    with statistic.lock, full_precision():
        return _reduce_fields(statistic, ranks, group)


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
