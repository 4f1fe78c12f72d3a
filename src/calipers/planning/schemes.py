"""Schemes with other groups, or without the observers that they name."""

from __future__ import annotations

from collections.abc import Iterable

from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStrategy,
)

from calipers.numerics.formats import Format, ScaleKind


def has_free_groups(args: QuantizationArgs | None) -> bool:
    """Whether a tensor is cut into groups whose size its format leaves open.

    >>> has_free_groups(QuantizationArgs(num_bits=4, strategy="group", group_size=128))
    True
    >>> has_free_groups(QuantizationArgs(num_bits=4, strategy="channel"))
    False
    """
    if args is None or args.strategy != QuantizationStrategy.GROUP:
        return False
    return Format.of(args).scale is ScaleKind.FLOAT


def regrouped(scheme: QuantizationScheme, size: int) -> QuantizationScheme:
    """Return a copy whose weights, if their groups are free, have groups of this size."""
    copy: QuantizationScheme = scheme.model_copy(deep=True)
    if has_free_groups(copy.weights):
        copy.weights = copy.weights.model_copy(update={"group_size": size})
    return copy


def without_observers(scheme: QuantizationScheme, fields: Iterable[str]) -> QuantizationScheme:
    """Return a copy whose arguments in these fields name no observer."""
    changed = {name: args_without_observer(getattr(scheme, name)) for name in fields}
    copy: QuantizationScheme = scheme.model_copy(deep=True).model_copy(update=changed)
    return copy


def args_without_observer(args: QuantizationArgs | None) -> QuantizationArgs | None:
    """Return a copy that names no observer."""
    if args is None:
        return None
    copy: QuantizationArgs = args.model_copy(update={"observer": None, "observer_kwargs": {}})
    return copy
