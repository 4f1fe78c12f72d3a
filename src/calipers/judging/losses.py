"""Which modules lose most by quantization, and through what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from calipers.judging.activations import ActivationCost
from calipers.judging.costs import COSTLY, ModuleCosts
from calipers.measurements.summary import LayerGrid, layer_grid

DECIBELS = (-60.0, 0.0)
"""The ends of a scale of errors in dB."""


def decibels(error: float | None) -> float | None:
    """Return a relative error in dB: 0 is all, −20 a tenth, −40 a hundredth; None for no error.

    >>> decibels(0.1), decibels(0.0), decibels(None)
    (-20.0, None, None)
    """
    return 20 * math.log10(error) if error else None


def error_of_decibels(level: float) -> float:
    """Return the relative error that a level in dB stands for.

    >>> error_of_decibels(-20.0)
    0.1
    """
    return float(10 ** (level / 20))


def format_decibels(error: float | None) -> str:
    """Return a relative error in dB as text.

    >>> format_decibels(0.1), format_decibels(0.9999), format_decibels(None)
    ('−20.0 dB', '0.0 dB', '–')
    """
    level = decibels(error)
    # Adding 0 makes a rounded −0.0 a 0.0; the sign is that of mathematics, not a hyphen.
    return "–" if level is None else f"{round(level, 1) + 0.0:.1f} dB".replace("-", "−")


def token_errors(values: Tensor, expected: Tensor) -> Tensor:
    """Return ‖values − expected‖ / ‖expected‖ of each token: vectors along the last dimension.

    Infinite where nothing was expected and there is something.
    """
    expected, values = expected.float(), values.to(expected.device).float()
    norm = torch.linalg.vector_norm(expected, dim=-1)
    error = torch.linalg.vector_norm(values - expected, dim=-1)
    return torch.where(error > 0, error / norm, 0.0).double()


Cause = Literal["weight", "input", "clipped input", "coarse input"]


@dataclass(frozen=True)
class ModuleLoss:
    """What a module loses.

    :param of: what is lost: the ``output``, or the ``weight`` where what outputs lose is not known
    :param error: ‖error‖ / ‖whole‖
    :param cause: what loses most: the ``weight``; a static ``input``; one whose largest values are
        clipped, or one that is too coarse for all but its largest values
    :param input: what the static input loses, if that is the cause
    """

    module: str
    of: Literal["output", "weight"]
    error: float
    cause: Cause = "weight"
    input: ActivationCost | None = None

    @property
    def decibels(self) -> float | None:
        """The error in dB; None where nothing is lost."""
        return decibels(self.error)

    @property
    def reason(self) -> str:
        """The cause in a few words."""
        if self.input is None:
            return self.cause
        largest, limit = f"{self.input.largest:.4g}", f"{self.input.limit:.4g}"
        return {
            "clipped input": f"static input up to {largest}: clipped at {limit}",
            "coarse input": f"static input up to {largest}: steps too coarse",
        }.get(self.cause, "static input")

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "module": self.module,
            "of": self.of,
            "error": self.error,
            "decibels": self.decibels,
            "cause": self.cause,
            "reason": self.reason,
        }


def module_losses(
    errors: Mapping[str, float], costs: Mapping[str, ModuleCosts]
) -> list[ModuleLoss]:
    """Return what each module loses, the worst first.

    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param costs: module → what its output loses, where data ran
    """
    known = [_of_output(name, cost) for name, cost in costs.items() if cost.weight is not None]
    told = {loss.module for loss in known}
    rest = [ModuleLoss(name, "weight", error) for name, error in errors.items() if name not in told]
    return sorted([*known, *rest], key=lambda loss: -loss.error)


def _of_output(name: str, cost: ModuleCosts) -> ModuleLoss:
    """Say what the output loses most through: of one input, in which of the two ways."""
    seen, by_input = cost.tensors.get("input"), cost.input_error or 0.0
    if seen is None or (cost.weight or 0.0) >= by_input:
        return ModuleLoss(name, "output", cost.output_error)
    cause: Cause = "input"
    if cost.input == by_input and seen.clipped and seen.error_in_largest > 0.5:
        cause = "clipped input"
    elif seen.typical_error > COSTLY:
        cause = "coarse input"
    return ModuleLoss(name, "output", cost.output_error, cause, seen)


def loss_grid(errors: Mapping[str, float], costs: Mapping[str, ModuleCosts]) -> LayerGrid:
    """Lay out what modules lose, in dB, by layer and kind."""
    order = {name: number for number, name in enumerate(errors)}
    losses = sorted(
        module_losses(errors, costs), key=lambda loss: order.get(loss.module, len(order))
    )
    return layer_grid({loss.module: loss.decibels for loss in losses if loss.decibels is not None})
