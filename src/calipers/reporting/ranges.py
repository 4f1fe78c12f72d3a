"""The range that was chosen for a tensor, beside those that other observers would choose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import Tensor

from calipers.errors import CalipersError
from calipers.judging.activations import RoundedValues
from calipers.numerics.formats import Format
from calipers.observers.spec import ObserverSpec, solve_stream
from calipers.statistics.base import Statistic
from calipers.statistics.value_counts import Distribution

OBSERVERS = ("static_minmax", "histogram_mse", "percentile", "entropy")
"""Those that find the range of a static activation from counts and extrema alone."""

REFERENCE = QuantizationArgs(num_bits=8, strategy="tensor")
"""Where no checkpoint has a static input: what int8 would make of it."""


class Shares(NamedTuple):
    """What a format under one scale makes of values.

    :param clipped: the share of values that are cut off: beyond its ends by more than half a step
    :param vanished: the share of values that are not zero and become zero
    :param error: √(Σ(q−x)² / Σx²)
    """

    clipped: float
    vanished: float
    error: float


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
    known: Iterable[Statistic], seen: Distribution, args: QuantizationArgs, *, exact: bool
) -> tuple[ChosenRange, ...]:
    """Let observers choose a range for what was measured; those that cannot are left out."""
    found = []
    known = list(known)
    for name in OBSERVERS:
        plain = args.model_copy(update={"observer": None, "observer_kwargs": {}, "dynamic": False})
        try:
            spec = ObserverSpec.resolve(
                "input", plain.model_copy(update={"observer": name}), allow_code=False
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
        scale, zero_point = qparams["scale"], qparams["zero_point"]
        found.append(range_of(name, seen, args, scale, zero_point, exact=exact))
    return tuple(found)


def range_of(
    observer: str,
    seen: Distribution,
    args: QuantizationArgs,
    scale: Tensor,
    zero_point: Tensor,
    *,
    exact: bool,
) -> ChosenRange:
    """Return the range that a scale stands for, and what becomes of values in it.

    :param exact: whether values were counted as they are, not rounded
    """
    fmt = Format.of(args)
    step, zero = float(scale.flatten()[0]), float(zero_point.flatten()[0])
    low, high = ((end - zero) * step for end in fmt.limits)
    values = fmt.values()
    smallest = float(values[values > 0].min())
    ends = (part.flatten()[0].cpu() for part in (scale, zero_point))
    rounded = RoundedValues.of(seen, args, *ends, exact=exact)
    shares = Shares(
        rounded.share(rounded.clipped),
        rounded.share((rounded.rounded == 0) & (rounded.values != 0)),
        rounded.error,
    )
    return ChosenRange(observer, low, high, abs(step) * smallest, shares)


def has_one_range(args: QuantizationArgs | None) -> bool:
    """Whether all values of a tensor share a scale that was found from data."""
    is_static = args is not None and args.dynamic is False
    return is_static and args is not None and args.strategy == QuantizationStrategy.TENSOR


def key_of(args: QuantizationArgs) -> str:
    """Return what arguments have in common under which observers choose the same range."""
    parts: Mapping[str, object] = {"type": args.type, "bits": args.num_bits}
    return f"{parts} {args.symmetric}"
