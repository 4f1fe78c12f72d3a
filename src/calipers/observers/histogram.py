"""Observers that count every value, and work out ranges from all of them at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from compressed_tensors.quantization import QuantizationStrategy
from pydantic import Field
from torch import Tensor
from typing_extensions import Self

from calipers.errors import (
    ConfigurationMismatchError,
    CountedStrategyError,
    EntropyFormatError,
    MergeError,
    UncountableError,
)
from calipers.numerics.entropy import entropy_range
from calipers.numerics.formats import Format
from calipers.numerics.layout import strategy_name
from calipers.numerics.percentile import bfloat16_upper_edge, percentile_range
from calipers.numerics.qparams import qparams_of
from calipers.observers.base import Observer, QParamsDict
from calipers.observers.observation import in_pieces
from calipers.observers.options import Bins, Norm, ObserverOptions, Percentile
from calipers.observers.solving import Problem, solve
from calipers.statistics.base import Reduction
from calipers.statistics.guarding import guarded
from calipers.statistics.value_counts import Distribution, ValueCounts

_COUNTED = (QuantizationStrategy.TENSOR, QuantizationStrategy.ATTN_HEAD)

Solver = Callable[[Distribution, Tensor, Tensor], tuple[Tensor, Tensor]]


@Observer.register("value_counts")
class ValueCountsObserver(ValueCounts, Observer):
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
    reductions: ClassVar[Mapping[str, Reduction]] = {
        "min_vals": Reduction.MIN,
        "max_vals": Reduction.MAX,
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.strategy not in _COUNTED:
            raise CountedStrategyError(self.label(), strategy_name(self.args))

    @in_pieces
    def update_statistics_from_observed(self, observed: Tensor) -> None:
        """Count the values, and reduce their exact extrema."""
        low, high = self.extrema(observed)
        pieces = self.pieces(observed)
        if pieces.dtype != torch.float16 and _overflows(low, high):
            raise UncountableError(self.label(), float(low.min()), float(high.max()), pieces.dtype)
        self.absorb(min_vals=low, max_vals=high)
        self.count(pieces)

    @guarded
    def get_statistics(self) -> dict[str, Tensor]:
        """Return everything the observer remembers, by name; further data does not change it."""
        self._own.clear()
        return super().get_statistics()

    def adopt(self, other: ValueCountsObserver) -> Self:
        """Take over a copy of what ``other`` has counted, in place of what is here.

        It must observe the same kind of tensor by the same strategy; solver, options and format
        may differ.
        """
        if not isinstance(other, ValueCountsObserver):
            raise MergeError(f"{self.label()} cannot adopt a {type(other).__name__}: no counts.")
        ours, theirs = self._measured(), other._measured()
        if ours != theirs:
            raise ConfigurationMismatchError(f"adopt by {self.label()}", ours, theirs)
        with other.lock:  # never both locks at once
            # Copied together: what ranks have in common already stays the same tensor in both.
            fields, synced = copy.deepcopy((other.fields(), other.synced))
        return self._replace_by(fields, synced)

    @guarded
    def _replace_by(self, fields: dict[str, Tensor], synced: dict[str, Tensor]) -> Self:
        self.reset()
        for name, value in fields.items():
            setattr(self, name, value)
        self.synced.update(synced)
        return self

    def _measured(self) -> dict[str, Any]:
        return {"base_name": self.base_name, "strategy": strategy_name(self.args)}

    def _solve(self, solver: Solver) -> tuple[Tensor, Tensor]:
        """Let ``solver`` work out the range of each piece from its distribution and exact extrema.

        What it returns is cut to the extrema; a piece without any value keeps them.
        """
        low, high = Observer.get_range(self)
        ends = [
            solver(distribution, *extrema) if len(distribution.values) else extrema
            for distribution, *extrema in zip(
                self.distributions(), low.flatten().cpu(), high.flatten().cpu(), strict=True
            )
        ]
        lows, highs = (
            torch.stack([end.to(low) for end in side]).reshape(low.shape)
            for side in zip(*ends, strict=True)
        )
        return torch.maximum(lows, low), torch.minimum(highs, high)


class HistogramMSEOptions(ObserverOptions):
    """How an error counts."""

    norm: Norm = Field(default=2.0, description="exponent of the error")


@Observer.register("histogram_mse")
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

    @torch.no_grad()
    @guarded
    def get_qparams(self) -> QParamsDict:
        """Work out the parameters from what was observed; changes nothing."""
        low, high = Observer.get_range(self)
        scale, zero_point = qparams_of(low, high, self.args, None, self.label())
        shape = scale.shape
        scale, zero_point = scale.flatten(), zero_point.flatten()
        for piece, seen in enumerate(self.distributions()):
            if len(seen.values):
                extremes = low.flatten()[piece], high.flatten()[piece]
                best = solve(self._problem(seen, *extremes))
                scale[piece], zero_point[piece] = best.scale, best.zero_point
        return {
            "scale": scale.reshape(shape),
            "zero_point": zero_point.reshape(shape),
            "global_scale": None,
        }

    @guarded
    def get_range(self) -> tuple[Tensor, Tensor]:
        """Return the range that the codes cover."""
        low, high = Format.of(self.args).limits
        qparams = self.get_qparams()
        scale = qparams["scale"].float()
        zero_point = qparams["zero_point"].to(scale)
        ends = ((end - zero_point) * scale for end in (low, high))
        lows, highs = (end.reshape(self.min_vals.shape).to(qparams["scale"]) for end in ends)
        return lows, highs

    def _problem(self, seen: Distribution, *extremes: Tensor) -> Problem:
        values = seen.values.to(extremes[0].dtype).reshape(1, 1, 1, -1)
        low, high = (end.reshape(1) for end in (values.min(), values.max()))
        weights = seen.counts.double().reshape(values.shape)
        of_data = extremes[0].reshape(1).cpu(), extremes[1].reshape(1).cpu()
        return Problem(values, low, high, self.args, self.options.norm, weights, extremes=of_data)


class PercentileOptions(ObserverOptions):
    """How much may be left out."""

    percentile: Percentile = Field(default=99.99, description="share of all values to keep, in %")


@Observer.register("percentile")
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

    @guarded
    def get_range(self) -> tuple[Tensor, Tensor]:
        """Return the range that keeps the asked share of the values of each piece."""
        return self._solve(self._keep_share)

    def _keep_share(self, seen: Distribution, low: Tensor, _high: Tensor) -> tuple[Tensor, Tensor]:
        ends = percentile_range(*seen, self.options.percentile, self.args.symmetric)
        if low.dtype.itemsize == 2:
            return ends
        # float64 is rounded to float32 on its way, up to half a float32 further.
        slack = int(low.dtype == torch.float64)
        return -bfloat16_upper_edge(-ends[0], slack), bfloat16_upper_edge(ends[1], slack)


class EntropyOptions(ObserverOptions):
    """How finely distributions are compared."""

    bins: Bins = Field(default=2048, description="bins of the whole range")


@Observer.register("entropy")
class EntropyObserver(ValueCountsObserver):
    """Takes the range whose quantized distribution diverges least from that of the values.

    For int8 and fp8. ``calipers.numerics.entropy.entropy_range`` defines it; the whole range is
    [−absmax, absmax] for symmetric formats, and from minimum to maximum, and to zero, for others.
    """

    when = "for comparison: it clips too much for language models"
    Options = EntropyOptions
    options: EntropyOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        fmt = Format.of(self.args)
        if fmt.bits != 8:
            raise EntropyFormatError(self.label(), f"{fmt.kind}{fmt.bits}")

    @guarded
    def get_range(self) -> tuple[Tensor, Tensor]:
        """Return the range of least divergence of each piece."""
        return self._solve(self._least_divergence)

    def _least_divergence(
        self, seen: Distribution, low: Tensor, high: Tensor
    ) -> tuple[Tensor, Tensor]:
        low, high = low.clamp(max=0), high.clamp(min=0)
        if self.args.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        if low == high:
            return low, high
        return entropy_range(*seen, low, high, self.args, self.options.bins)


def _overflows(low: Tensor, high: Tensor) -> bool:
    """Whether rounding to bfloat16 makes an extremum infinite."""
    return bool(torch.stack([low, high]).to(torch.bfloat16).isinf().any())
