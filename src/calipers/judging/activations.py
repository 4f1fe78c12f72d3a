"""What quantization makes of an activation, from the count of every value that was seen.

And what the output of a module loses by that of its input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.numerics.formats import Format
from calipers.numerics.layout import shared_columns
from calipers.numerics.qparams import quantize_dequantize
from calipers.observers import QParamsDict
from calipers.statistics.value_counts import Distribution, ValueCounts

LARGEST_SHARE = 0.001
"""The part of all values, the largest ones, that a typical error leaves out.

Massive activations of language models are a few channels of a few tokens, far less than a
thousandth of the values, and can carry nearly all of Σx². An error relative to that is small
whatever becomes of the other values."""

_ROUNDED = 2.0**-8  # how far, at most, a float is moved by rounding it to bfloat16


def relative_error(lost: float, whole: float) -> float:
    """Return ‖error‖ / ‖whole‖ from sums of squares; 0 where there is nothing to lose.

    >>> relative_error(0.01, 1.0)
    0.1
    """
    return math.sqrt(lost / whole) if whole else 0.0


@dataclass(frozen=True)
class ActivationCost:
    """What static quantization makes of a tensor, from the count of every value that was seen.

    :param clipped: the share of values beyond the range by more than half a step
    :param error: √(Σ(q−x)² / Σx²) over all values
    :param typical_error: the same without the largest thousandth of the values: a few huge ones
        hide what all others lose
    :param error_in_largest: the share of Σ(q−x)² that falls on those largest values
    :param largest: the largest magnitude that was seen
    :param limit: the largest magnitude that codes reach, on the side of ``largest``
    :param exact: whether values were counted as they are. Those of float32 are rounded to bfloat16
        first: errors are then within 0.004, ``largest`` within 0.4 %, and ``clipped`` counts only
        what is beyond doubt
    """

    clipped: float
    error: float
    typical_error: float
    error_in_largest: float
    largest: float
    limit: float
    exact: bool

    @property
    def worst(self) -> float:
        """The larger of the two errors."""
        return max(self.error, self.typical_error)


class RoundedValues(NamedTuple):
    """Values that share a scale, as they were seen and as they become, in float64.

    :param counts: how often each value occurred
    :param clipped: which lie beyond the last code by more than half a step. Those within are
        rounded to it, and lose no more than values between two codes
    """

    values: Tensor
    counts: Tensor
    rounded: Tensor
    clipped: Tensor

    @classmethod
    def of(
        cls,
        seen: Distribution,
        args: QuantizationArgs,
        scale: Tensor,
        zero_point: Tensor,
        *,
        exact: bool = True,
    ) -> RoundedValues:
        """Round values.

        :param scale: a single one, as its zero point
        :param exact: whether values were counted as they are. Those of float32 were rounded to
            bfloat16 first, and count as clipped only if they were so before that
        """
        fmt = Format.of(args)
        x, scale, zero = (part.double() for part in (seen.values, scale, zero_point))
        codes = x * (1 if exact else 1 - _ROUNDED) / scale + zero
        low, high = fmt.limits
        steps = fmt.values().double().diff()
        return cls(
            x,
            seen.counts.double(),
            quantize_dequantize(x, scale, None if args.symmetric else zero, fmt),
            (codes > high + steps[-1] / 2) | (codes < low - steps[0] / 2),
        )

    @property
    def lost(self) -> Tensor:
        """Σ(q−x)² over the occurrences of each value."""
        return (self.rounded - self.values).square() * self.counts

    @property
    def whole(self) -> Tensor:
        """Σx² over the occurrences of each value."""
        return self.values.square() * self.counts

    @property
    def error(self) -> float:
        """√(Σ(q−x)² / Σx²)."""
        return relative_error(float(self.lost.sum()), float(self.whole.sum()))

    def share(self, chosen: Tensor) -> float:
        """Return the share of all occurrences that are of chosen values."""
        total = float(self.counts.sum())
        return float(self.counts[chosen].sum()) / total if total else 0.0


def activation_cost(
    seen: ValueCounts, exact: bool, args: QuantizationArgs, qparams: QParamsDict
) -> ActivationCost | None:
    """Work out what parameters make of the values that were counted; None if there were none.

    >>> import torch
    >>> seen = ValueCounts()
    >>> seen.update(torch.tensor([[1.0, 3.0, 600.0]], dtype=torch.bfloat16))
    >>> qparams = {"scale": torch.ones(1), "zero_point": torch.zeros(1), "global_scale": None}
    >>> activation_cost(seen, True, QuantizationArgs(num_bits=8), qparams).largest
    600.0
    """
    scales = qparams["scale"].double().flatten().cpu()
    zeros = qparams["zero_point"].double().flatten().cpu()
    low, high = Format.of(args).limits
    ends, sums = [], []
    for distribution, scale, zero in zip(seen.distributions(), scales, zeros, strict=True):
        if not len(distribution.values):
            continue
        rounded = RoundedValues.of(distribution, args, scale, zero, exact=exact)
        x, counts = rounded.values, rounded.counts
        errors, energies = rounded.lost, rounded.whole
        outermost = x[x.abs().argmax()]
        code = high if outermost > 0 else low
        ends.append((float(outermost.abs()), float(((code - zero) * scale).abs())))
        typical = x.abs() <= _magnitude_of_share(1 - LARGEST_SHARE, x, counts)
        parts = counts, counts[rounded.clipped], errors, energies, errors[typical]
        sums.append([float(part.sum()) for part in (*parts, energies[typical])])
    if not sums:
        return None
    largest, limit = max(ends, key=lambda pair: pair[0] / pair[1] if pair[1] else 0)
    total, clipped, lost, whole, typical_lost, typical_whole = (
        math.fsum(part) for part in zip(*sums, strict=True)
    )
    return ActivationCost(
        clipped=clipped / total,
        error=relative_error(lost, whole),
        typical_error=relative_error(typical_lost, typical_whole),
        error_in_largest=1 - typical_lost / lost if lost else 0.0,
        largest=largest,
        limit=limit,
        exact=exact,
    )


def _magnitude_of_share(share: float, values: Tensor, counts: Tensor) -> Tensor:
    """Return the least magnitude that a share of the values, rounded up, stay within."""
    ordered, order = values.abs().sort()
    reached = counts[order].cumsum(0)
    enough = math.ceil(share * float(reached[-1]))
    return ordered[int((reached < enough).sum())]


def dynamic_error(seen: Distribution, args: QuantizationArgs, columns: int) -> float:
    """Estimate the relative error of values whose scale is found while the model runs.

    Of as many independent values as share a scale, the largest is about the one that all but one of
    them stay below; scales are as if it were always that, and larger values as if they had theirs.
    """
    shared = shared_columns(args) or columns
    x = seen.values.double()
    largest = _magnitude_of_share(1 - 1 / shared, x, seen.counts.double())
    if not float(largest):
        return 0.0
    scale = largest / Format.of(args).limits[1]
    rounded = RoundedValues.of(seen, args, scale, scale.new_zeros(()))
    usual = x.abs() <= largest
    return relative_error(float(rounded.lost[usual].sum()), float(rounded.whole[usual].sum()))


# The output of a module


def input_errors(
    seen: ActivationCost, x: Tensor, output: float, columns: Tensor
) -> tuple[float, float | None]:
    """Return the error of the output by that of the input: of all values, and of typical ones.

    :param x: E[x²] of each input channel
    :param output: E‖y‖²
    :param columns: Σw² of each column of the weight
    """
    total = float(x.sum())
    alone = float((columns * x).sum())  # E‖y‖² if channels were independent of each other
    if not alone:
        return 0.0, 0.0
    gain = output / alone
    error = seen.error**2 * total
    in_largest = _concentrated(error * seen.error_in_largest, x)
    elsewhere = error * (1 - seen.error_in_largest)
    lost = in_largest + _spread(elsewhere, x - in_largest)
    whole = relative_error(_passed_on(lost, x, columns, gain), output)
    if not seen.typical_error:
        return whole, 0.0
    usual = x - _concentrated(total - elsewhere / seen.typical_error**2, x)
    lost = _spread(elsewhere, usual)
    return whole, relative_error(
        _passed_on(lost, usual, columns, gain), gain * float((columns * usual).sum())
    )


def _passed_on(lost: Tensor, x: Tensor, columns: Tensor, gain: float) -> float:
    """Return the energy at the output of what channels of energy ``x`` lose.

    The best that a coarse grid can keep of a channel is (1−f)·x, f the share that is lost: f² of
    its energy is then missing, and goes together with other channels as the signal does; the rest,
    f·(1−f), is noise.
    """
    share = torch.where(x > 0, lost / x, 0.0).clamp(0, 1)
    return float((columns * x * (share * (1 - share) + share.square() * gain)).sum())


def _concentrated(total: float, most: Tensor) -> Tensor:
    """Let the largest take as much as they can, until nothing is left."""
    ordered, order = most.sort(descending=True)
    left = total - (ordered.cumsum(0) - ordered)
    return torch.empty_like(most).scatter_(0, order, left.clamp(min=0).minimum(ordered))


def _spread(total: float, most: Tensor) -> Tensor:
    """Spread a sum evenly; nobody takes more than its most."""
    ordered = most.sort().values
    taken = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)[:-1]])
    levels = (total - taken) / torch.arange(len(ordered), 0, -1, device=most.device)
    enough = levels <= ordered
    return most.clamp(max=float(levels[enough][0])) if bool(enough.any()) else most
