"""What the page shows of a single module: distributions, and ranges beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs

from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.checkpoint.stored_module import QuantizedWeight, StoredModule
from calipers.numerics.formats import Format
from calipers.reporting.channels import ChannelRanges
from calipers.reporting.histograms import LogHistogram, distribution_of
from calipers.reporting.labels import args_label
from calipers.reporting.measured import Measured, MeasuredInput
from calipers.reporting.ranges import (
    REFERENCE,
    ChosenRange,
    has_one_range,
    key_of,
    range_of,
    ranges_by_observers,
)
from calipers.reporting.source import SourceModel


class ObserverRanges(NamedTuple):
    """The ranges that observers would choose for an input in some format."""

    format: str
    ranges: tuple[ChosenRange, ...]


class InputDetail(NamedTuple):
    """What was seen of the input of some modules.

    :param by_format: one entry for each format in which a checkpoint has this input; int8 by
        tensor, as a reference, where none has
    """

    readers: tuple[str, ...]
    tokens: int
    exact: bool
    histogram: LogHistogram | None
    channels: ChannelRanges | None
    by_format: tuple[ObserverRanges, ...]


class WeightDetail(NamedTuple):
    """The weight of a module before it was quantized."""

    rows: int
    columns: int
    histogram: LogHistogram
    largest: float
    rms: float


class WeightLimits(NamedTuple):
    """The largest magnitude that codes reach, over all groups of a weight."""

    least: float
    median: float
    largest: float
    groups: int


def input_details(
    measured: Measured, checkpoints: Sequence[QuantizedCheckpoint]
) -> tuple[InputDetail, ...]:
    """Return what was seen of each distinct input."""
    return tuple(_input(seen, checkpoints) for seen in measured.inputs)


def _input(seen: MeasuredInput, checkpoints: Sequence[QuantizedCheckpoint]) -> InputDetail:
    formats = {key_of(args): args for args in _static_args(seen.readers, checkpoints)}
    by_format = []
    if seen.values is not None and len(seen.values.values):
        for args in formats.values() or (REFERENCE,):
            found = ranges_by_observers(
                seen.statistics.values(), seen.values, args, exact=seen.exact
            )
            by_format.append(ObserverRanges(args_label(args), found))
    return InputDetail(
        seen.readers,
        seen.tokens,
        seen.exact,
        None if seen.values is None else LogHistogram.of(seen.values),
        seen.channels,
        tuple(by_format),
    )


def _static_args(
    names: Iterable[str], checkpoints: Sequence[QuantizedCheckpoint]
) -> Iterable[QuantizationArgs]:
    for name in names:
        for module in (each.quantized.get(name) for each in checkpoints):
            scheme = None if module is None else module.scheme
            if scheme is not None and has_one_range(scheme.input_activations):
                yield scheme.input_activations


def chosen_ranges(
    checkpoint: QuantizedCheckpoint, inputs: Mapping[str, MeasuredInput]
) -> dict[str, ChosenRange]:
    """Return the range of each static input, and what becomes of the values that were seen."""
    found = {}
    for name, module in checkpoint.quantized.items():
        seen, args = inputs.get(name), dict(module.sides).get("input")
        scale = module.read("input_scale") if has_one_range(args) else None
        if args is None or seen is None or seen.values is None:
            continue
        if scale is None or not scale.numel():
            continue
        zero = module.read("input_zero_point")
        zero = torch.zeros(1) if zero is None or not zero.numel() else zero
        found[name] = range_of("this checkpoint", seen.values, args, scale, zero, exact=seen.exact)
    return found


def weight_limits(module: StoredModule) -> WeightLimits | None:
    """Return how far codes reach in the groups of a weight."""
    if module.weights is None or not module.is_sound:
        return None
    scales = QuantizedWeight.of(module).scales()
    if not scales.numel():
        return None
    largest = max(abs(end) for end in Format.of(module.weights).limits)
    limits = scales.abs().flatten() * largest
    if not bool(torch.isfinite(limits).all()):
        return None
    ends = (float(limits.min()), float(limits.median()), float(limits.max()))
    return WeightLimits(*ends, limits.numel())


def weight_detail(source: SourceModel, module: str) -> WeightDetail | None:
    """Return how the values of a weight are distributed; None if there is no such weight."""
    weight = source.weight(module)
    if weight is None or weight.ndim != 2 or not weight.numel():
        return None
    seen = distribution_of(weight)
    energy = (seen.values.double().square() * seen.counts).sum()
    return WeightDetail(
        weight.shape[0],
        weight.shape[1],
        LogHistogram.of(seen),
        float(seen.values.abs().max()) if len(seen.values) else 0.0,
        float((energy / seen.counts.sum()).sqrt()),
    )
