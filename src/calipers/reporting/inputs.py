"""What measurements tell of the inputs of modules: distributions, channels, and ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from torch import Tensor

from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.errors import CalipersError, MeasurementsError, counted, shortened
from calipers.judging.activations import RoundedValues
from calipers.judging.costs import Streams
from calipers.measurements import Measurements, MeasurementsInfo
from calipers.measurements.summary import Magnitudes
from calipers.measurements.tensors import Statistics, readers_of
from calipers.numerics.formats import Format
from calipers.observers.spec import ObserverSpec
from calipers.planning.measuring import CHANNEL_EXTREMA, HESSIAN
from calipers.planning.specs import COUNTS, SQUARES
from calipers.statistics.base import Statistic
from calipers.statistics.ranges import Extrema
from calipers.statistics.sums import TokenSquares
from calipers.statistics.value_counts import Distribution, ValueCounts

OUTLIER = 8.0
"""A channel is an outlier if its largest magnitude is that many times the median of all."""

_MOST_SHOWN = 256
_MOST_NAMED = 12


@dataclass(frozen=True)
class Channel:
    """A channel, its extrema, and how many times the median of all it reaches."""

    index: int
    low: float
    high: float
    times: float


@dataclass(frozen=True)
class ChannelRanges:
    """The extrema of the channels of an input; of many, those of runs of equal length.

    :param width: how many channels share a pair of extrema
    :param median: of the largest magnitudes of channels
    :param outliers: how many channels are outliers
    :param worst: the largest outliers
    """

    count: int
    width: int
    lows: tuple[float, ...]
    highs: tuple[float, ...]
    median: float
    outliers: int
    worst: tuple[Channel, ...]

    @classmethod
    def of(cls, lows: Tensor, highs: Tensor) -> ChannelRanges | None:
        """Find the outliers; None where extrema are missing or not finite.

        >>> found = ChannelRanges.of(-torch.ones(5), torch.tensor([1.0, 1.0, 20.0, 0.5, 1.0]))
        >>> found.outliers, found.worst
        (1, (Channel(index=2, low=-1.0, high=20.0, times=20.0),))
        """
        lows, highs = lows.flatten().float().cpu(), highs.flatten().float().cpu()
        largest = torch.maximum(lows.abs(), highs.abs())
        if not len(lows) or not bool(torch.isfinite(largest).all()):
            return None
        median = float(largest.median())
        times = largest / median if median else torch.zeros_like(largest)
        far = (times > OUTLIER).nonzero().squeeze(1)
        order = far[times[far].argsort(descending=True, stable=True)][:_MOST_NAMED]
        worst = tuple(
            Channel(int(i), float(lows[i]), float(highs[i]), float(times[i])) for i in order
        )
        width = -(-len(lows) // _MOST_SHOWN)
        return cls(
            len(lows),
            width,
            tuple(float(part.min()) for part in torch.split(lows, width)),
            tuple(float(part.max()) for part in torch.split(highs, width)),
            median,
            len(far),
            worst,
        )


_BINS_PER_OCTAVE = 4
_MOST_OCTAVES = 24


def histogram_of(seen: Distribution) -> Magnitudes:
    """Return how many values have which magnitude, in bins of a quarter of an octave."""
    return Magnitudes.of(seen.values, seen.counts, _BINS_PER_OCTAVE, _MOST_OCTAVES)


def distribution_of(values: Tensor) -> Distribution:
    """Return the finite values of a tensor, rounded to bfloat16 if they are wider, and counts."""
    counts = ValueCounts()
    counts.update(values.reshape(1, -1))
    return next(counts.distributions())


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
    known: Sequence[Statistic], seen: Distribution, args: QuantizationArgs, *, exact: bool
) -> tuple[ChosenRange, ...]:
    """Let observers choose a range for what was measured; those that cannot are left out."""
    ranges = []
    for name in OBSERVERS:
        own = {"observer": name, "observer_kwargs": {}, "dynamic": False}
        try:
            spec = ObserverSpec.resolve("input", args.model_copy(update=own), allow_code=False)
            assert spec is not None
            statistics = {key: create("") for key, create in spec.statistics.items()}
            if not all(each.derive_from(known) for each in statistics.values()):
                continue
            qparams = spec.solve_stream(statistics)
        except CalipersError:  # not for this format, or for these values
            continue
        if qparams is not None:
            scale, zero_point = qparams["scale"], qparams["zero_point"]
            ranges.append(range_of(name, seen, args, scale, zero_point, exact=exact))
    return tuple(ranges)


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
    scale, zero_point = scale.flatten()[0].cpu(), zero_point.flatten()[0].cpu()
    step, zero = float(scale), float(zero_point)
    low, high = ((end - zero) * step for end in fmt.limits)
    values = fmt.values()
    smallest = float(values[values > 0].min())
    rounded = RoundedValues.of(seen, args, scale, zero_point, exact=exact)
    shares = Shares(
        rounded.share(rounded.clipped),
        rounded.share((rounded.rounded == 0) & (rounded.values != 0)),
        rounded.error,
    )
    return ChosenRange(observer, low, high, abs(step) * smallest, shares)


def has_one_range(args: QuantizationArgs | None) -> bool:
    """Whether all values of a tensor share a scale that was found from data."""
    if args is None or args.dynamic is not False:
        return False
    return bool(args.strategy == QuantizationStrategy.TENSOR)


class MeasuredInput(NamedTuple):
    """What is known of the input of some modules.

    :param exact: whether values were counted as they are, not rounded
    """

    readers: tuple[str, ...]
    tokens: int
    statistics: Statistics
    values: Distribution | None
    exact: bool
    channels: ChannelRanges | None


@dataclass(frozen=True)
class Measured:
    """What was measured of a model.

    :param inputs: the distinct inputs of modules
    :param outputs: module → what is known of its output, where outputs were collected
    """

    info: MeasurementsInfo | None = None
    inputs: tuple[MeasuredInput, ...] = ()
    outputs: Mapping[str, Statistics] = field(default_factory=dict)

    @classmethod
    def of(cls, measurements: Measurements) -> Measured:
        """Read measurements."""
        tensors = measurements.tensors()
        inputs = []
        for places, statistics in readers_of(tensors):
            if places[0][1] != "input":
                continue
            counts, extrema = _counts(statistics), statistics.get(CHANNEL_EXTREMA)
            channels = None
            if isinstance(extrema, Extrema) and "min_vals" in extrema.fields():
                channels = ChannelRanges.of(extrema.min_vals, extrema.max_vals)
            inputs.append(
                MeasuredInput(
                    tuple(module for module, _ in places),
                    min((each.num_tokens for each in statistics.values()), default=0),
                    statistics,
                    None if counts is None else next(iter(counts.distributions()), None),
                    counts is not None and counts.is_exact,
                    channels,
                )
            )
        outputs = {
            module: statistics
            for (module, base_name), statistics in tensors.items()
            if base_name == "output" and _counts(statistics) is not None
        }
        return cls(measurements.info, tuple(inputs), outputs)

    def streams_of(self, module: str, weight: Tensor) -> Streams | None:
        """Return what went through a module; None where that is not known.

        A Hessian of the input tells what the output was, too.
        """
        seen = self.by_module.get(module)
        if seen is None or (seen.channels and seen.channels.count != weight.shape[-1]):
            return None
        hessian, outputs = seen.statistics.get(HESSIAN), TokenSquares()
        if hessian is not None:
            return Streams.of(hessian, None, weight)
        outputs.derive_from(self.outputs.get(module, {}).values())
        return Streams.of(seen.statistics.get(SQUARES), outputs, weight)

    @cached_property
    def by_module(self) -> dict[str, MeasuredInput]:
        """The input of each module."""
        return {module: each for each in self.inputs for module in each.readers}

    def check_fits(self, checkpoint: QuantizedCheckpoint) -> None:
        """Refuse measurements of another model than a checkpoint is of."""
        known, quantized = self.by_module, checkpoint.quantized
        unknown = [name for name in quantized if name not in known]
        wrong = []
        for name, module in quantized.items():
            channels = known[name].channels if name in known else None
            if module.weight_shape and channels and channels.count != module.weight_shape[-1]:
                wrong.append(name)
        if known and quantized and len(unknown) == len(quantized):
            problem = f"none of its {counted(len(unknown), 'quantized module')} was measured"
        elif wrong:
            problem = f"inputs are of other widths there: {shortened(wrong, 3)}"
        else:
            return
        raise MeasurementsError(
            f"are of another model than the checkpoint '{checkpoint.name}': {problem}",
            subject="The measurements",
            hint="Give those of the model that the checkpoint was made from.",
        )


def _counts(statistics: Statistics) -> ValueCounts | None:
    found = statistics.get(COUNTS)
    return found if isinstance(found, ValueCounts) and found.num_tokens else None
