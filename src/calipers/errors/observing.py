"""Tensors, formats, observers and statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calipers.errors.base import CalipersError, ConfigurationError, TensorValueError
from calipers.errors.formatting import counted


class LayoutError(ConfigurationError):
    """A strategy and a tensor that do not fit each other."""


class UnsuitableError(ConfigurationError):
    """An observer that is not made for this kind of tensor, strategy or format."""


class UnknownObserverError(CalipersError, KeyError):
    """A name under which no observer is registered."""

    exit_code = 2


class TensorKindError(CalipersError, TypeError):
    """A tensor of a kind that cannot be observed."""

    exit_code = 2


class NoStatisticsError(CalipersError, AssertionError):
    """A result was asked for that needs something to be observed first, or again."""

    exit_code = 4


class MergeError(CalipersError, ValueError):
    """Statistics that cannot become one, or not those that were saved."""

    exit_code = 5


class ImportanceError(CalipersError, ValueError):
    """Importance that cannot be used."""

    exit_code = 3


class ImportanceUnsupportedError(ImportanceError, NotImplementedError):
    """Importance for a kind of tensor or strategy that has none."""


def unsupported_format(what: str) -> ConfigurationError:
    """Refuse a number format that does not exist here."""
    return ConfigurationError(
        "is not a supported format",
        subject=what,
        allowed="int with 2 to 8 bits and float with 8 bits (fp8 e4m3), symmetric or not; float "
        "with 4 bits (fp4 e2m1), symmetric",
    )


def mask_of_scores() -> LayoutError:
    """Refuse a mask that is no mask of tokens."""
    return LayoutError(
        "The mask must be 1 for tokens that count and 0 for others; this looks like one that is "
        "added to attention scores"
    )


def not_finite(where: str, count: int, total: int, shape: Sequence[int]) -> TensorValueError:
    """Refuse a tensor with NaN or Inf in it."""
    return TensorValueError(
        f"was given {counted(count, 'non-finite value')} (NaN or Inf) among {total}, in a tensor "
        f"of shape {tuple(shape)}. Nothing was recorded",
        subject=where,
        hint='Find out where they come from, or pass nonfinite="ignore" to leave them out and '
        "count them",
    )


def no_statistics(location: str = "") -> NoStatisticsError:
    """Say that nothing was observed yet."""
    nothing = f" Nothing reached {location}." if location else ""
    return NoStatisticsError(
        "No statistics available", hint=f"Call observer(value) first.{nothing}"
    )


def weight_gone(where: str, problem: str) -> NoStatisticsError:
    """Refuse a result that needs the weight, which a saved or merged observer does not have."""
    return NoStatisticsError(
        f"{problem} the weight it observed, which a report and a global scale shared with fused "
        "observers need",
        subject=where,
        hint="Call observer(weight) again",
    )


def different_configurations(
    action: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> MergeError:
    """Refuse statistics that were gathered under another configuration; show both."""
    differing = sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
    lines = [f"  {key}: {ours.get(key)!r} here, {theirs.get(key)!r} there" for key in differing]
    return MergeError("\n".join([f"Cannot {action}: the configurations differ.", *lines]))
