"""What is measured of a model for whoever quantizes it later, in whatever way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import torch
from compressed_tensors.quantization import QuantizationArgs

from calipers.errors import ConfigurationError, not_allowed
from calipers.numerics.library_versions import is_cached_attention_module
from calipers.planning.matching import what_there_is
from calipers.planning.plan import Plan
from calipers.planning.specs import COUNTS, SENSITIVITY, SQUARES, Requirement
from calipers.statistics.base import Statistic
from calipers.statistics.hessian import BlockHessians
from calipers.statistics.moments import SquareSums
from calipers.statistics.ranges import Extrema
from calipers.statistics.sensitivity import Sensitivity
from calipers.statistics.value_counts import ValueCounts

Collected = Literal["hessian", "outputs", "attention", "sensitivity"]
"""What is collected on request, beside what is known of the input of every Linear module."""

EXTREMA = "extrema"
CHANNEL_EXTREMA = "channel_extrema"
HESSIAN = "hessian"
HEAD_COUNTS = "head_counts"
HEAD_EXTREMA = "head_extrema"

_TENSOR = QuantizationArgs(num_bits=8, strategy="tensor")
_CHANNEL = QuantizationArgs(num_bits=8, strategy="group", group_size=1)
_HEAD = QuantizationArgs(num_bits=8, strategy="attn_head")


def check_collected(collect: str | Collection[str]) -> tuple[str, ...]:
    """Return what is to be collected, in a fixed order; refuse what cannot be.

    >>> check_collected("outputs,hessian")
    ('hessian', 'outputs')
    """
    words = collect.split(",") if isinstance(collect, str) else collect
    names = {str(word).strip() for word in words} - {""}
    known = get_args(Collected)
    for name in sorted(names - set(known)):
        raise not_allowed("collect", name, known)
    return tuple(name for name in known if name in names)


def collecting_plan(model: torch.nn.Module, collect: Collection[str] = ()) -> Plan:
    """Ask for statistics of the input of every Linear module, and for what is on request."""
    measured: dict[str, tuple[Requirement, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            measured[name] = tuple(_of_linear(module.in_features, collect))
        elif "attention" in collect and is_cached_attention_module(module):
            measured[name] = tuple(each for base in ("q", "k", "v") for each in _of_states(base))
    if not measured:
        problem = f"{type(model).__name__} has no Linear module to measure"
        raise ConfigurationError(problem, hint=what_there_is(model))
    return Plan(measured=measured)


def _of_linear(channels: int, collect: Collection[str]) -> Iterator[Requirement]:
    yield from _of_values("input")
    yield _halved("input", CHANNEL_EXTREMA, partial(Extrema, "input", _CHANNEL))
    yield _halved("input", SQUARES, SquareSums)
    if "hessian" in collect:
        yield _required("input", HESSIAN, partial(BlockHessians, channels))
    if "outputs" in collect:
        yield from _of_values("output")
    if "sensitivity" in collect:
        yield _required("weight", SENSITIVITY, Sensitivity)


def _of_states(base_name: str) -> Iterator[Requirement]:
    yield from _of_values(base_name)
    yield _required(base_name, HEAD_COUNTS, partial(ValueCounts, base_name, "attn_head"))
    yield _required(base_name, HEAD_EXTREMA, partial(Extrema, base_name, _HEAD))


def _of_values(base_name: str) -> Iterator[Requirement]:
    yield _halved(base_name, COUNTS, partial(ValueCounts, base_name))
    yield _halved(base_name, EXTREMA, partial(Extrema, base_name, _TENSOR))


def _required(base_name: str, key: str, make: Callable[[], Statistic]) -> Requirement:
    def create(name: str) -> Statistic:
        statistic = make()
        statistic.owner = f"{base_name} of {name}"
        return statistic

    return Requirement(base_name, key, create)


def _halved(base_name: str, key: str, make: Callable[[], Statistic]) -> Requirement:
    """Ask for a statistic of each half of the data."""
    return replace(_required(base_name, key, make), in_halves=True)
