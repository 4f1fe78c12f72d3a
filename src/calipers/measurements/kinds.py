"""The statistics that can be kept in a file: made from what they say of themselves, and checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor

from calipers.errors import CalipersError
from calipers.kernels.reductions import BINS
from calipers.registry import Registry
from calipers.statistics.base import Statistic
from calipers.statistics.sums import NonFinite
from calipers.statistics.value_counts import TABLES

STATISTICS: Registry[type[Statistic]] = Registry(
    "statistic",
    "calipers.statistics",
    {
        "BlockHessians": "calipers.statistics.sums:BlockHessians",
        "Extrema": "calipers.statistics.ranges:Extrema",
        "Sensitivity": "calipers.statistics.sums:Sensitivity",
        "SquareSums": "calipers.statistics.sums:SquareSums",
        "ValueCounts": "calipers.statistics.value_counts:ValueCounts",
    },
    base=Statistic,
)
"""The statistics that a file can have, by the names of their classes."""


def statistic_of(configuration: Mapping[str, Any]) -> Statistic:
    """Return an empty statistic of a configuration; ValueError where there is none.

    >>> statistic_of({"class": "SquareSums", "nonfinite": "raise"}).configuration()
    {'class': 'SquareSums', 'nonfinite': 'raise'}
    """
    options = dict(configuration)
    kind = options.pop("class", None)
    if kind not in STATISTICS:
        raise ValueError(f"there is no statistic {kind!r}")
    if not (options.get("nonfinite", "keep") in get_args(NonFinite) and _is_width(options)):
        raise ValueError(f"there is no {kind} of {options}")
    try:
        made = STATISTICS.get(str(kind)).from_configuration(options)
    except (CalipersError, KeyError, TypeError) as error:
        raise ValueError(f"there is no {kind} of {options}: {error}") from error
    if _given(made.configuration()) != _given(configuration):
        raise ValueError(f"there is no {kind} of {options}")
    return made


def _given(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a configuration says; what it leaves out may be there as None or not at all."""
    return {name: value for name, value in configuration.items() if value is not None}


def _is_width(options: Mapping[str, Any]) -> bool:
    width = options.get("width", 1)
    return isinstance(width, int) and width > 0


def problem_with(statistic: Statistic, fields: Mapping[str, Tensor]) -> str | None:
    """Say why a statistic cannot have such fields, if it cannot; none are those of no data."""
    if not fields:
        return None
    required = [name for name in statistic.declared() if name not in TABLES]
    missing = [name for name in required if name not in fields]
    if missing:
        return f"it lacks {', '.join(missing)}"
    for name, value in fields.items():
        problem = _problem_with_field(name, value)
        if problem:
            return f"{name} {problem}"
    return statistic.problem_with(fields)


def _problem_with_field(name: str, value: Tensor) -> str | None:
    if name in TABLES:
        return None  # checked when it was unpacked
    if name.endswith("_like"):
        fits = value.is_floating_point() and value.shape == (0,)
        return None if fits else "must be an empty tensor of floats"
    if name in ("min_vals", "max_vals"):
        fits = value.is_floating_point() and _is_finite(value)
        return None if fits else "must be finite floats"
    if name.endswith("_sum"):
        fits = value.dtype == torch.float64 and _is_finite(value)
        return None if fits else "must be finite float64"
    fits = value.dtype == torch.int64 and not value.ndim and int(value) >= 0
    return None if fits else "must be one int64, not below zero"


def _is_finite(value: Tensor) -> bool:
    """Whether all values are finite; unlike torch.isfinite, without copies of a large Hessian."""
    ends = value.aminmax() if value.numel() else ()
    return all(bool(torch.isfinite(end)) for end in ends)


def problem_with_table(packed: Tensor, shape: tuple[int, ...]) -> str | None:
    """Say why a table of counts cannot be of a shape: it would have pieces without values."""
    if not shape or shape[-1] != BINS or packed.ndim != 2:
        return f"it must be of shape (2, n), for a table of shape (…, {BINS})"
    pieces = math.prod(shape[:-1])
    return None if 1 <= pieces <= packed.shape[-1] else f"{pieces} tables without a value in each"
