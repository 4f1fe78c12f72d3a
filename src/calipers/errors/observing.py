"""Tensors, formats, observers and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from calipers.errors.base import CalipersError, ConfigurationError, TensorValueError
from calipers.errors.formatting import listing, nearest, sizes_that_divide


class UnsupportedFormatError(ConfigurationError):
    """The arguments name a number format that does not exist here."""

    def __init__(self, what: str) -> None:
        super().__init__(
            "is not a supported format",
            subject=what,
            hint="Supported: int with 2 to 8 bits and float with 8 bits (fp8 e4m3), symmetric or "
            "not; float with 4 bits (fp4 e2m1), symmetric",
        )


class LayoutError(ConfigurationError):
    """A strategy and a tensor that do not fit each other."""


class StrategyError(LayoutError):
    """A strategy that has no meaning for this kind of tensor."""

    def __init__(self, strategy: str, base_name: str, allowed: Iterable[str]) -> None:
        super().__init__(
            f"Strategy '{strategy}' cannot be applied to '{base_name}'",
            hint=f"Allowed for '{base_name}': {listing(allowed)}",
        )


class UnsuitableError(ConfigurationError):
    """An observer that is not made for this kind of tensor, strategy or format."""


class CountedStrategyError(UnsuitableError, LayoutError):
    """A strategy with too many scales to count the values of each."""

    def __init__(self, where: str, strategy: str) -> None:
        super().__init__(
            "values are counted per tensor or per head (strategies tensor and attn_head), not per "
            f"'{strategy}'",
            where=where,
            hint="Use 'static_minmax' or 'mse' for this strategy",
        )


class EntropyFormatError(UnsuitableError):
    """A format whose codes are too few for entropy to tell anything."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(
            f"entropy compares distributions of 8-bit codes, int8 or fp8, not {what}",
            where=where,
            hint="Use 'percentile' or 'mse' for this format",
        )


class UnknownBaseNameError(ConfigurationError):
    """A tensor role that does not exist."""

    def __init__(self, base_name: object, known: Iterable[str]) -> None:
        super().__init__(f"Unknown base_name {base_name!r}", allowed=list(known))


class DivisibilityError(LayoutError):
    """A group size that does not divide the dimension it cuts."""

    def __init__(self, strategy: str, base_name: str, size: int, group_size: int) -> None:
        super().__init__(
            f"Strategy '{strategy}' needs group_size to divide the last dimension of "
            f"'{base_name}': {size} is not divisible by {group_size}",
            hint=sizes_that_divide(size),
        )


class TensorKindError(CalipersError, TypeError):
    """A tensor of a kind that cannot be observed."""

    exit_code = 2


class ComplexTensorError(TensorKindError):
    """Complex numbers have no order, hence no range."""

    def __init__(self, where: str, dtype: object) -> None:
        super().__init__(
            f"was given a complex tensor ({dtype})",
            subject=where,
            hint="Observe its real and imaginary parts separately, or exclude the module",
        )


class NonFiniteError(TensorValueError):
    """NaN or Inf in an observed tensor."""

    def __init__(self, where: str, count: int, total: int, shape: Sequence[int]) -> None:
        super().__init__(
            f"was given {count} non-finite value{'s' if count > 1 else ''} (NaN or Inf) among "
            f"{total}, in a tensor of shape {tuple(shape)}. Nothing was recorded",
            subject=where,
            hint='Find out where they come from, or pass nonfinite="ignore" to leave them out and '
            "count them",
        )


class UncountableError(TensorValueError):
    """Values beyond what bfloat16 can hold, in whose bins they would be counted."""

    def __init__(self, where: str, low: float, high: float, dtype: object) -> None:
        super().__init__(
            f"was given values from {low:g} to {high:g} ({dtype}). They are counted as bfloat16, "
            "which ends at ±3.38953e+38. Nothing was recorded",
            subject=where,
            hint="Scale the tensor down, or use 'static_minmax'",
        )


class NonFiniteRangeError(TensorValueError):
    """A range from which no scale can be made."""

    def __init__(self, where: str, count: int, total: int) -> None:
        super().__init__(
            f"{count} of {total} ranges have no finite, positive scale",
            where=where,
            hint="Their min or max is NaN, Inf, or beyond what the dtype of the scale can hold",
        )


class ShapeChangedError(CalipersError, ValueError):
    """A stream whose tensors do not agree in shape."""

    exit_code = 2

    def __init__(self, where: str, field: str, before: Sequence[int], now: Sequence[int]) -> None:
        super().__init__(
            f"has seen tensors with {field} of shape {tuple(before)}, and now one of shape "
            f"{tuple(now)}",
            subject=where,
            hint="One observer watches one tensor: use another one, or reset() this one",
        )


class UnknownOptionError(ConfigurationError):
    """An option that the observer does not have."""

    def __init__(self, owner: str, option: str, known: Iterable[str]) -> None:
        known = sorted(known)
        self.option = option
        super().__init__(
            f"Unknown option '{option}' for observer '{owner}'",
            meant=nearest(option, known),
            hint=f"Options: {listing(known)}",
        )


class InvalidOptionError(ConfigurationError):
    """An option with a value outside its domain."""

    def __init__(self, owner: str, problems: Iterable[str]) -> None:
        super().__init__("; ".join(problems), where=f"Observer '{owner}'")


class UnknownObserverError(CalipersError, KeyError):
    """A name under which no observer is registered."""

    exit_code = 2

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(
            f"Unknown observer '{name}'",
            meant=nearest(name, known),
            hint=f"Registered: {listing(known)}. A class of your own is given as "
            "'path/to/file.py:Class'",
        )


class RegistrationError(ConfigurationError):
    """A class that cannot be registered, or a plug-in that cannot be loaded."""


class NoStatisticsError(CalipersError, AssertionError):
    """Parameters were asked for before anything was observed."""

    exit_code = 4

    def __init__(self, location: str = "") -> None:
        super().__init__(
            "No statistics available",
            hint="Call observer(value) first."
            + (f" Nothing reached {location}." if location else ""),
        )


class FusedStatisticsError(CalipersError, AssertionError):
    """Some of the observers that share a global scale have seen nothing."""

    exit_code = 4

    def __init__(self, where: str, missing: Iterable[str]) -> None:
        super().__init__(
            f"shares its global_scale with observers that have no statistics: {listing(missing)}",
            subject=where,
            hint="Call each of them on its tensor before get_qparams() on any",
        )


class WeightGoneError(CalipersError, AssertionError):
    """A result that needs the weight, which a saved or merged observer does not have."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(
            f"{problem} the weight it observed, which a report and a global scale shared with "
            "fused observers need",
            subject=where,
            hint="Call observer(weight) again",
        )


class MergeError(CalipersError, ValueError):
    """Two statistics that cannot become one."""

    exit_code = 5


class NotMergeableError(MergeError):
    """A statistic that forgets too much to be merged."""

    def __init__(self, where: str, fields: Mapping[str, str]) -> None:
        reasons = ", ".join(f"{name} ({reason})" for name, reason in fields.items())
        super().__init__(
            f"cannot merge: what it keeps depends on the order of the data: {reasons}",
            subject=where,
            hint="Use a statistic with memory of all data, such as 'static_minmax'",
        )


class ConfigurationMismatchError(MergeError):
    """Statistics that were gathered under different configurations."""

    def __init__(self, action: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
        differing = sorted(k for k in {*ours, *theirs} if ours.get(k) != theirs.get(k))
        lines = [f"  {key}: {ours.get(key)!r} here, {theirs.get(key)!r} there" for key in differing]
        super().__init__("\n".join([f"Cannot {action}: the configurations differ.", *lines]))


class SavedStateError(CalipersError, ValueError):
    """A saved field that cannot be what was saved."""

    exit_code = 5

    def __init__(self, where: str, field: str, problem: str) -> None:
        super().__init__(
            f"cannot load '{field}': {problem}. Nothing was loaded",
            subject=where,
            hint="The file is damaged; save it again from the observer that gathered it",
        )


class ImportanceError(CalipersError, ValueError):
    """Importance was demanded (strict) and cannot be used."""

    exit_code = 3

    def __init__(self, where: str, problem: str) -> None:
        self.reason = f"{where}: {problem}."
        super().__init__(
            problem, where=where, hint="With strict=False it would fall back to plain error"
        )


class ImportanceUnsupportedError(ImportanceError, NotImplementedError):
    """Importance was demanded (strict) for a kind of tensor or strategy that has none."""
