"""The range that was chosen for a tensor, beside those that other observers would choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import Tensor

from calipers.errors import CalipersError
from calipers.numerics.formats import Format
from calipers.observers.solving import solve_stream
from calipers.observers.spec import ObserverSpec
from calipers.reporting.histograms import Shares
from calipers.statistics.base import Statistic
from calipers.statistics.value_counts import Distribution

OBSERVERS = ("static_minmax", "histogram_mse", "percentile", "entropy")
"""Those that find the range of a static activation from counts and extrema alone."""

REFERENCE = QuantizationArgs(num_bits=8, strategy="tensor")
"""Where no checkpoint has a static input: what int8 would make of it."""


class ChosenRange(NamedTuple):
    """A range, who chose it, and what becomes of the values that were seen.

    :param low: the lowest value that codes reach
    :param high: the highest one
    :param step: the distance of the two codes next to zero
    """

    observer: str
    low: float
    high: float
    step: float
    shares: Shares


def ranges_by_observers(
    known: Iterable[Statistic], seen: Distribution, args: QuantizationArgs, base_name: str = "input"
) -> tuple[ChosenRange, ...]:
    """Let observers choose a range for what was measured; those that cannot are left out."""
    found = []
    known = list(known)
    for name in OBSERVERS:
        plain = args.model_copy(update={"observer": None, "observer_kwargs": {}, "dynamic": False})
        try:
            spec = ObserverSpec.resolve(
                base_name, plain.model_copy(update={"observer": name}), allow_code=False
            )
            assert spec is not None
            seen_by = {key: create("") for key, create in spec.statistics.items()}
            if not all(each.derive_from(known) for each in seen_by.values()):
                continue
            qparams = solve_stream(spec, seen_by)
            if qparams is None:
                continue
        except CalipersError:  # not for this format, or for these values
            continue
        found.append(range_of(name, seen, args, qparams["scale"], qparams["zero_point"]))
    return tuple(found)


def range_of(
    observer: str, seen: Distribution, args: QuantizationArgs, scale: Tensor, zero_point: Tensor
) -> ChosenRange:
    """Return the range that a scale stands for, and what becomes of values in it."""
    fmt = Format.of(args)
    step, zero = float(scale.flatten()[0]), float(zero_point.flatten()[0])
    low, high = ((end - zero) * step for end in fmt.limits)
    values = fmt.values()
    smallest = float(values[values > 0].min())
    shares = Shares.of(seen, args, scale, zero_point)
    return ChosenRange(observer, low, high, abs(step) * smallest, shares)


def has_one_range(args: QuantizationArgs | None) -> bool:
    """Whether all values of a tensor share a scale that was found from data."""
    is_static = args is not None and args.dynamic is False
    return is_static and args is not None and args.strategy == QuantizationStrategy.TENSOR


def key_of(args: QuantizationArgs) -> str:
    """Return what arguments have in common under which observers choose the same range."""
    parts: Mapping[str, object] = {"type": args.type, "bits": args.num_bits}
    return f"{parts} {args.symmetric}"
