"""Calls that take turns in one process; of each the fastest counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROUNDS, SECONDS = 5, 2.0  # every race takes at least as many turns and as long
PEER_SECONDS, QUICK_PEER_SECONDS = 20.0, 0.5  # after as many, the peer is not run again

Prepare = Callable[[], Callable[[], object]]
"""Makes ready, outside of the timing, what is then timed."""


def seconds_of_others() -> float:
    """Return the processor time so far of all but us and our processes; 0 where nobody tells."""
    source = Path("/proc/stat")
    if not source.exists():
        return 0.0
    user, nice, system, _idle, _wait, *interrupts_and_stolen = (
        int(ticks) for ticks in source.read_text().split()[1:9]
    )
    ticks = user + nice + system + sum(interrupts_and_stolen)
    ours = os.times()
    return ticks / os.sysconf("SC_CLK_TCK") - sum(ours[:4])  # with children that have ended


def race(lanes: Mapping[str, list[Prepare]], quick: bool = False) -> dict[str, float]:
    """Let all lanes take turns, and return the seconds of the fastest call in each.

    The peer, in lanes whose name begins with it, is slow: it runs once, and again until its time is
    used up, of which there is little if ``quick``.
    """
    allowed = QUICK_PEER_SECONDS if quick else PEER_SECONDS
    times: dict[str, list[float]] = {name: [] for name in lanes}
    started, rounds = time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - started < SECONDS:
        rounds += 1
        for name, calls in lanes.items():
            spent = sum(times[name])
            if not name.startswith("peer") or not times[name] or spent < allowed:
                times[name] += [seconds(prepare()) for prepare in calls]
    return {name: min(found) for name, found in times.items()}


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def calling(function: Callable[..., object], *args: Any) -> Prepare:
    """Call a function that needs no preparation."""
    return lambda: partial(function, *args)


def with_threads(count: int, prepare: Prepare) -> Prepare:
    """Set the number of threads beforehand."""

    def prepare_threads() -> Callable[[], object]:
        torch.set_num_threads(count)
        return prepare()

    return prepare_threads
