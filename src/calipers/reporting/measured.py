"""What measurements tell of the inputs of modules; an input that several read is looked at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from calipers.checkpoint.quantized import QuantizedCheckpoint
from calipers.checkpoint.stored_module import StoredModule
from calipers.errors import MeasurementsError, counted, shortened
from calipers.judging.streams import Streams
from calipers.measurements import Measurements, MeasurementsInfo
from calipers.measurements.tensors import Statistics, readers_of
from calipers.planning.measuring import CHANNEL_EXTREMA, HESSIAN
from calipers.planning.specs import COUNTS, SQUARES
from calipers.reporting.channels import ChannelRanges
from calipers.statistics.ranges import Extrema
from calipers.statistics.sums import TokenSquares
from calipers.statistics.value_counts import Distribution, ValueCounts


class MeasuredInput(NamedTuple):
    """What is known of the input of some modules.

    :param readers: the modules
    :param values: how often each value occurred
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
            if places[0][1] == "input":
                inputs.append(_input(tuple(module for module, _ in places), statistics))
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
        wrong = [
            name
            for name, module in quantized.items()
            if name in known and not _has_width(module, known[name])
        ]
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


def _input(readers: tuple[str, ...], statistics: Statistics) -> MeasuredInput:
    counts, extrema = _counts(statistics), statistics.get(CHANNEL_EXTREMA)
    channels = None
    if isinstance(extrema, Extrema) and "min_vals" in extrema.fields():
        channels = ChannelRanges.of(extrema.min_vals, extrema.max_vals)
    values = None if counts is None else next(iter(counts.distributions()), None)
    return MeasuredInput(
        readers,
        _tokens(statistics),
        statistics,
        values,
        counts is not None and counts.is_exact,
        channels,
    )


def _counts(statistics: Statistics) -> ValueCounts | None:
    found = statistics.get(COUNTS)
    return found if isinstance(found, ValueCounts) and found.num_tokens else None


def _tokens(statistics: Statistics) -> int:
    each: Iterable[int] = (statistic.num_tokens for statistic in statistics.values())
    return min(each, default=0)


def _has_width(module: StoredModule, seen: MeasuredInput) -> bool:
    shape = module.weight_shape
    return not shape or seen.channels is None or seen.channels.count == shape[-1]
