"""What quantization costs: how far static activations, and the outputs of modules, are off.

Every figure is relative, ‖error‖ / ‖whole‖ over all tokens that were seen. An error of the output
is what the weight, or the input, causes by itself while the other stays as it was.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import CalipersWarning, counted, shortened
from calipers.numerics.formats import Format
from calipers.numerics.qparams import quantize_dequantize
from calipers.observers import QParamsDict
from calipers.statistics.value_counts import Distribution, ValueCounts

LARGEST_SHARE = 0.001
"""The part of all values, the largest ones, that a typical error leaves out."""

COSTLY = 0.2
"""A static activation that loses more than this is warned of."""

_ROUNDED = 2.0**-8  # how far, at most, a float is moved by rounding it to bfloat16


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


@dataclass(frozen=True)
class ModuleCosts:
    """What quantization makes of a module. None: not measured, since no data ran, or not static.

    :param weight: the relative error of the output that the weight causes: √(E‖ΔW x‖² / E‖y‖²).
        Estimated from E[x²] of each channel, or from E[x xᵀ] where a Hessian was gathered: errors
        of channels (of blocks of them) count as independent of each other
    :param input: the same for a static input. Estimated from its error: that of the largest values
        as if the strongest channels had it, that of others spread evenly, and no channel loses more
        than it has. Off by a few percent; by up to a factor of two where most is lost
    :param typical_input: the same for tokens without any of the largest thousandth of the values
    :param tensors: static activation (``input``, ``output``, ``q``, ``k``, ``v``) → its cost
    :param loss: by how much the loss of the model, in nats per token, is predicted to grow by what
        the weight loses; those of all modules add up. Known where sensitivity was measured
    """

    weight: float | None = None
    input: float | None = None
    typical_input: float | None = None
    tensors: dict[str, ActivationCost] = field(default_factory=dict)
    loss: float | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModuleCosts:
        """Return the costs that :func:`dataclasses.asdict` made plain data of.

        >>> ModuleCosts.from_dict({"weight": 0.25, "tensors": {}})
        ModuleCosts(weight=0.25, input=None, typical_input=None, tensors={}, loss=None)
        """
        tensors = {name: ActivationCost(**cost) for name, cost in data["tensors"].items()}
        return cls(**{**data, "tensors": tensors})

    @property
    def input_error(self) -> float | None:
        """The error of the output that the static input causes, over all tokens or typical ones.

        The larger of the two: a few huge values can hide what all others lose.
        """
        known = [error for error in (self.input, self.typical_input) if error is not None]
        return max(known, default=None)

    @property
    def output_error(self) -> float:
        """The error of the output by weight and input together; what is not known counts as 0."""
        return combined_error(self.weight or 0.0, self.input_error or 0.0)

    def shares(self) -> dict[str, str]:
        """Return the errors of the output in percent, by what causes them.

        >>> ModuleCosts(weight=0.0075).shares()
        {'weight': '0.75%', 'input': '–', 'typical input': '–'}
        """
        errors = {"weight": self.weight, "input": self.input, "typical input": self.typical_input}
        return {name: "–" if e is None else f"{e:.2%}" for name, e in errors.items()}


def combined_error(by_weight: float, by_input: float) -> float:
    """Return the relative error of an output, √(by_weight² + by_input²).

    The rounding errors of a weight and of its input are independent, so that the energies of what
    they do to the output add up. This is the error of a module wherever Calipers names one.

    >>> combined_error(0.03, 0.04)
    0.05
    """
    return math.hypot(by_weight, by_input)


def costly(costs: Mapping[str, ModuleCosts]) -> dict[tuple[str, str], ActivationCost]:
    """Return the static activations that lose more than ``COSTLY``, the worst first."""
    found = {
        (name, base_name): cost
        for name, module in costs.items()
        for base_name, cost in module.tensors.items()
        if cost.worst > COSTLY
    }
    return dict(sorted(found.items(), key=lambda pair: -pair[1].worst))


def report_costs(costs: Mapping[str, ModuleCosts]) -> None:
    """Warn of static activations that lose too much."""
    found = costly(costs)
    if found:
        named = [f"{name}.{base_name} ({c.worst:.0%})" for (name, base_name), c in found.items()]
        loses = "loses" if len(found) == 1 else "lose"
        warnings.warn(
            f"{counted(len(found), 'static activation')} {loses} more than {COSTLY:.0%}: "
            f"{shortened(named)}. Quantize activations dynamically, leave such modules out, or "
            "choose another observer; 'costs' of the result and of calipers.json tell more.",
            CalipersWarning,
            stacklevel=3,
        )


# Activations


def activation_cost(
    seen: ValueCounts, exact: bool, args: QuantizationArgs, qparams: QParamsDict
) -> ActivationCost | None:
    """Work out what parameters make of the values that were counted; None if there were none.

    >>> import torch
    >>> seen = ValueCounts()
    >>> seen.update(torch.tensor([[1.0, 3.0, 600.0]], dtype=torch.bfloat16))
    >>> found = {"scale": torch.ones(1), "zero_point": torch.zeros(1), "global_scale": None}
    >>> activation_cost(seen, True, QuantizationArgs(num_bits=8), found).largest
    600.0
    """
    scales = qparams["scale"].double().flatten().cpu()
    zeros = qparams["zero_point"].double().flatten().cpu()
    pieces = [
        _piece(distribution, exact, args, scale, zero)
        for distribution, scale, zero in zip(seen.distributions(), scales, zeros, strict=True)
        if len(distribution.values)
    ]
    if not pieces:
        return None
    outermost = max(pieces, key=lambda piece: piece.largest / piece.limit if piece.limit else 0)
    total = _Piece(*map(math.fsum, zip(*pieces, strict=True)))
    return ActivationCost(
        clipped=total.clipped / total.values,
        error=relative(total.error, total.whole),
        typical_error=relative(total.typical_error, total.typical),
        error_in_largest=1 - total.typical_error / total.error if total.error else 0.0,
        largest=outermost.largest,
        limit=outermost.limit,
        exact=exact,
    )


class _Piece(NamedTuple):
    """What becomes of the values that share a scale: numbers and sums of squares."""

    largest: float
    limit: float
    values: float
    clipped: float
    error: float
    whole: float
    typical_error: float
    typical: float


def _piece(
    seen: Distribution, exact: bool, args: QuantizationArgs, scale: Tensor, zero: Tensor
) -> _Piece:
    fmt = Format.of(args)
    x, counts = seen.values.double(), seen.counts.double()
    offset = None if args.symmetric else zero
    error = (quantize_dequantize(x, scale, offset, fmt) - x).square() * counts
    whole = x.square() * counts
    codes = x * (1 if exact else 1 - _ROUNDED) / scale + zero
    low, high = fmt.limits
    steps = fmt.values().double().diff()
    beyond = (codes > high + steps[-1] / 2) | (codes < low - steps[0] / 2)
    largest = x[x.abs().argmax()]
    limit = ((high if largest > 0 else low) - zero) * scale
    usual = x.abs() <= _magnitude_of_most(x.abs(), counts)
    return _Piece(
        float(largest.abs()),
        float(limit.abs()),
        float(counts.sum()),
        float(counts[beyond].sum()),
        float(error.sum()),
        float(whole.sum()),
        float(error[usual].sum()),
        float(whole[usual].sum()),
    )


def _magnitude_of_most(magnitudes: Tensor, counts: Tensor) -> Tensor:
    """Return the least magnitude that all but the largest thousandth of the values stay within."""
    ordered, order = magnitudes.sort()
    reached = counts[order].cumsum(0)
    enough = math.ceil((1 - LARGEST_SHARE) * float(reached[-1]))
    return ordered[int((reached < enough).sum())]


def relative(error: float, whole: float) -> float:
    """Return ‖error‖ / ‖whole‖ from sums of squares; 0 where there is nothing to lose."""
    return math.sqrt(error / whole) if whole else 0.0
