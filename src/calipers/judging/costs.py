"""What quantization costs: how far static activations, and the outputs of modules, are off.

Every figure is relative, ‖error‖ / ‖whole‖ over all tokens that were seen. An error of the output
is what the weight, or the input, causes by itself while the other stays as it was.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from calipers.errors import CalipersWarning, counted, shortened
from calipers.judging.errors import combined_error

COSTLY = 0.2
"""A static activation that loses more than this is warned of."""


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

    @property
    def total_loss(self) -> float | None:
        """What the loss of the model gains by weight and input together.

        The loss grows with the energy of the error at the output, whatever that comes from.
        """
        if self.loss is None or not self.weight:
            return self.loss
        return self.loss * (self.output_error / self.weight) ** 2

    def with_estimates(self, weight: float, by_input: float) -> ModuleCosts:
        """Return the costs with estimates in the place of errors that are not known.

        :param weight: ‖Q(W) − W‖ / ‖W‖, which the output loses where its inputs are nothing special
        :param by_input: an estimate of what the output loses by its input
        """
        return replace(
            self,
            weight=weight if self.weight is None else self.weight,
            input=by_input if self.input_error is None else self.input,
        )


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
