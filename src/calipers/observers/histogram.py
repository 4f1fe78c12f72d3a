"""Observers that count every value, and work out ranges from all of them at once."""

from __future__ import annotations

import copy

import torch
from compressed_tensors.quantization import QuantizationArgs
from pydantic import Field
from typing_extensions import Self

from calipers.errors import MergeError, UnsuitableError, different_configurations
from calipers.numerics.formats import Format
from calipers.numerics.layout import has_few_scales, strategy_name
from calipers.observers.base import Observer
from calipers.observers.definition import Definition, QParamsDict, Range
from calipers.observers.options import Bins, Norm, ObserverOptions, Percentile
from calipers.solvers.distribution import entropy_range, percentile_range
from calipers.solvers.scales import CountedValues, least_error
from calipers.statistics.base import guarded
from calipers.statistics.ranges import Extrema
from calipers.statistics.value_counts import ValueCounts


def least_error_qparams(seen: CountedValues, options: HistogramMSEOptions) -> QParamsDict:
    """Return the scale and zero point with the least error over all values."""
    scale, zero_point = least_error(seen, options.norm)
    return {"scale": scale, "zero_point": zero_point, "global_scale": None}


def covered_range(qparams: QParamsDict, args: QuantizationArgs, shape: torch.Size) -> Range:
    """Return the range that the codes cover."""
    low, high = Format.of(args).limits
    scale = qparams["scale"].float()
    zero_point = qparams["zero_point"].to(scale)
    ends = ((end - zero_point) * scale for end in (low, high))
    lows, highs = (end.reshape(shape).to(qparams["scale"]) for end in ends)
    return lows, highs


def kept_range(seen: CountedValues, options: PercentileOptions) -> Range:
    """Return the range that keeps the asked share of the values of each piece."""
    return percentile_range(seen, options.percentile)


def closest_range(seen: CountedValues, options: EntropyOptions) -> Range:
    """Return the range of least divergence of each piece."""
    return entropy_range(seen, options.bins)


class ValueCountsObserver(Observer):
    """Counts every value, per tensor or per head; its own range are the extrema of all data.

    What it has counted serves every solver and format: ``adopt`` hands it on.

    >>> from compressed_tensors.quantization import QuantizationArgs
    >>> int8, fp8 = QuantizationArgs(num_bits=8), QuantizationArgs(num_bits=8, type="float")
    >>> measured = ValueCountsObserver("input", int8)(torch.randn(32, 64))
    >>> percentile = Observer.load_from_registry("percentile", base_name="input", args=fp8)
    >>> percentile.adopt(measured).num_observed_tokens
    32
    """

    remembers = "how often each value occurred, and extrema"
    when = "activations: measure once, then `adopt` by `histogram_mse`, `percentile` or `entropy`"
    Options = ObserverOptions
    counts: ValueCounts
    definition = Definition(Extrema, counts_values=True)

    @classmethod
    def check(
        cls, base_name: str, args: QuantizationArgs, options: ObserverOptions, fmt: Format
    ) -> None:
        """Refuse strategies with many pieces, for each of which all values would be counted."""
        super().check(base_name, args, options, fmt)
        if not has_few_scales(args):
            raise UnsuitableError(
                "values are counted per tensor or per head (strategies tensor and attn_head), not "
                f"per '{strategy_name(args)}'",
                where=cls.label_of(base_name),
                hint="Use 'static_minmax' or 'mse' for this strategy",
            )

    @torch.no_grad()
    @guarded
    def get_qparams(self) -> QParamsDict:
        """Work out the parameters from what was observed; changes nothing."""
        definition = self.definition
        assert definition is not None
        if definition.qparams_from_counts is None:
            return super().get_qparams()
        return definition.qparams_from_counts(self._counted(), self.options)

    @guarded
    def get_range(self) -> Range:
        """Return the range that is made from the counts, or that the codes cover."""
        definition = self.definition
        assert definition is not None
        if definition.qparams_from_counts is not None:
            return covered_range(self.get_qparams(), self.args, self.min_vals.shape)
        if definition.range_from_counts is not None:
            return definition.range_from_counts(self._counted(), self.options)
        return super().get_range()

    def adopt(self, other: ValueCountsObserver) -> Self:
        """Take over a copy of what ``other`` has counted, in place of what is here.

        It must observe the same kind of tensor by the same strategy; solver, options and format
        may differ.
        """
        if not isinstance(other, ValueCountsObserver):
            raise MergeError(
                f"cannot adopt a {type(other).__name__}: no counts", subject=self.label()
            )
        ours, theirs = (
            {"base_name": each.base_name, "strategy": strategy_name(each.args)}
            for each in (self, other)
        )
        if ours != theirs:
            raise different_configurations(f"adopt by {self.label()}", ours, theirs)
        with other.lock:  # never both locks at once
            # Copied together: what ranks have in common already stays the same tensor in both.
            fields, synced = copy.deepcopy((other.fields(), other.synced))
        with self.lock:
            self.replace_fields(fields)
            self.synced.update(synced)
        return self

    def _counted(self) -> CountedValues:
        """Return what solvers ask for."""
        low, high = super().get_range()
        return CountedValues(self.counts.distributions(), low, high, self.args, self.label())


class HistogramMSEOptions(ObserverOptions):
    """How an error counts."""

    norm: Norm = Field(default=2.0, description="exponent of the error")


class HistogramMSEObserver(ValueCountsObserver):
    """Takes, of all scales (and zero points) that can be stored, the best for all data at once.

    What is least is Σ|q−x|^norm over every value that was ever seen, not an average of what was
    best for single batches. Scales of 16 bits are tried all. Of float32 scales the exact optimum
    is found for norm 2; for other norms, and for asymmetric formats, that of the scales with 11
    and 8 significant bits (the latter then improved until its codes stay as they are).
    """

    when = "activations and KV cache: the best of all storable scales for all data at once"
    Options = HistogramMSEOptions
    options: HistogramMSEOptions
    definition = Definition(Extrema, counts_values=True, qparams_from_counts=least_error_qparams)


class PercentileOptions(ObserverOptions):
    """How much may be left out."""

    percentile: Percentile = Field(default=99.99, description="share of all values to keep, in %")


class PercentileObserver(ValueCountsObserver):
    """Leaves out the outermost values: at most 100 − ``percentile`` percent of all that were seen.

    Symmetric formats: the smallest t for which no more than that share has |x| > t. Asymmetric
    ones: at most half of it below the low end and half above the high end. Nothing is interpolated:
    an end is a value that occurred. Where float32 or float64 was observed, or both 16-bit dtypes
    were, it is the outer edge of the bin of that value, so that never more is left out than asked.
    No end lies beyond the extrema, and 100 gives exactly them.
    """

    when = (
        "static int8 activations with moderate outliers; "
        "it cuts massive ones off and ruins such models"
    )
    Options = PercentileOptions
    options: PercentileOptions
    definition = Definition(Extrema, counts_values=True, range_from_counts=kept_range)


class EntropyOptions(ObserverOptions):
    """How finely distributions are compared."""

    bins: Bins = Field(default=2048, description="bins of the whole range")


class EntropyObserver(ValueCountsObserver):
    """Takes the range whose quantized distribution diverges least from that of the values.

    For int8 and fp8. ``calipers.solvers.distribution.entropy_range`` defines it; the whole range is
    [−absmax, absmax] for symmetric formats, and from minimum to maximum, and to zero, for others.
    """

    when = "for comparison: it clips too much for language models"
    Options = EntropyOptions
    options: EntropyOptions
    definition = Definition(Extrema, counts_values=True, range_from_counts=closest_range)

    @classmethod
    def check(
        cls, base_name: str, args: QuantizationArgs, options: ObserverOptions, fmt: Format
    ) -> None:
        """Refuse formats of few codes."""
        super().check(base_name, args, options, fmt)
        if fmt.bits != 8:
            raise UnsuitableError(
                f"entropy compares distributions of 8-bit codes, int8 or fp8, not {fmt.name}",
                where=cls.label_of(base_name),
                hint="Use 'percentile' or 'mse' for this format",
            )
