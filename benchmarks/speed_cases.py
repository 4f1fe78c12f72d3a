"""What speed.py measures, and what it should reach.

Goals are set for size 4096 and 2 threads, and are the same for every instruction set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from agreement import FORMATS  # says what to do if the peer is not installed
from compressed_tensors.quantization import QuantizationArgs
from tables import Goal


def faster(times: float) -> Goal:
    """Ask to be so many times faster than the peer."""
    return Goal("times_faster", "≥", times)


def limits(count: float) -> Goal:
    """Ask to take no longer than so many times what the arithmetic takes."""
    return Goal("ours_to_limit", "≤", count)


def passes(count: float) -> Goal:
    """Ask to take no longer than so many memory passes."""
    return Goal("ours_to_pass", "≤", count)


def searches(count: float) -> Goal:
    """Ask to take no longer than so many of our own searches with their defaults."""
    return Goal("ours_to_search", "≤", count)


def of_bf16(count: float) -> Goal:
    """Ask to take no longer than so many times the time of a bfloat16 weight."""
    return Goal("ours_to_bf16", "≤", count)


class Case(NamedTuple):
    """An observer in a format, and what it should reach, by dtype."""

    observer: str
    format: str
    options: Mapping[str, Any] = {}
    goals: Mapping[str, tuple[Goal, ...]] = {}

    def build(self, library: Any) -> Any:
        """Build the observer of ours or of the peer, which changes its arguments."""
        args = QuantizationArgs(**FORMATS[self.format])
        options = {"base_name": "weight", "args": args, **self.options}
        return library.load_from_registry(self.observer, **options)

    def fits(self, size: int) -> bool:
        """Whether rows of this size can be cut into its groups."""
        return size % int(FORMATS[self.format].get("group_size", 1)) == 0


class Optimum(NamedTuple):
    """A format of the best of all scales, a search of the peer, and what should be reached.

    :param peers: what every importance should reach beside the peer, with a bfloat16 weight
    :param ours: what importance ``none`` and ``imatrix`` should reach beside our own search
    :param floats: whether a float32 weight, with float32 scales, is measured too
    """

    format: str
    peer: str
    peers: tuple[Goal, ...] = ()
    ours: tuple[Goal, ...] = ()
    floats: bool = True


STRATEGIES = {
    "tensor": Case("memoryless_minmax", "fp8 tensor"),
    "channel": Case("memoryless_minmax", "int8 channel"),
    "group 128": Case("memoryless_minmax", "int4 group 128"),
    "tensor_group 16": Case("memoryless_minmax", "NVFP4"),
    "block 128x128": Case("memoryless_minmax", "fp8 block 128x128"),
}
SIZES = (64, 256, 512, 1024, 2048, 4096, 8192)
LEAST_SIZE = 256  # from here on min-max is judged by the peer
LEAST_SIZE_OF_PASSES = 2048  # from here on by memory passes too

SEARCHED = ("int4 group 128", "int8 channel", "fp8 channel")
SEARCHES = (
    *(
        Case(
            "memoryless_mse",
            fmt,
            {"norm": 2.4},
            {"fp32": (faster(60), limits(2)), "bf16": (faster(25), limits(2))},
        )
        for fmt in SEARCHED
    ),
    *(Case("memoryless_mse", fmt, {"norm": 2.0}, {"fp32": (faster(150),)}) for fmt in SEARCHED),
    Case("imatrix_mse", "int4 group 128", goals={"fp32": (faster(60),)}),
    Case("memoryless_mse", "NVFP4", goals={"fp32": (faster(120),)}),
    Case("nvfp4_expanded_mse", "NVFP4", goals={"fp32": (faster(120),)}),
)
SLOW_PEER = "nvfp4_expanded_mse"
OPTIMA = (
    Optimum("int4 group 128", "memoryless_mse", (faster(10),), (searches(3),)),
    Optimum("int8 channel", "memoryless_mse", (), (searches(3),)),
    Optimum("fp8 channel", "memoryless_mse"),
    Optimum("NVFP4", SLOW_PEER, (faster(200),), (searches(3),), floats=False),
)
FLOATS_GOAL = of_bf16(5)
GROWING = (SEARCHES[0], SEARCHES[1], SEARCHES[7])
THREADED = (STRATEGIES["group 128"], SEARCHES[0], SEARCHES[2])
SUM_GOALS = {"bf16": (passes(2),)}
COUNT_GOALS = {"bf16": (passes(6),)}
