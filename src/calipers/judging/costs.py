"""What quantization costs: how far static activations, and the outputs of modules, are off.

Every figure is relative, ‖error‖ / ‖whole‖ over all tokens that were seen. An error of the output
is what the weight, or the input, causes by itself while the other stays as it was.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calipers.errors import CalipersWarning, counted, shortened
from calipers.judging.activations import ActivationCost, activation_cost
from calipers.judging.weights import Streams, WeightLoss, relative_error, weight_loss
from calipers.kernels.reductions import sum_of_squares
from calipers.kernels.rounding import PACKED
from calipers.measurements import Measurements
from calipers.planning.specs import (
    COUNTS,
    IMPORTANCE,
    SENSITIVITY,
    SQUARES,
    ModuleSpec,
    TensorSpec,
    module_format,
)
from calipers.statistics.sums import Sensitivity
from calipers.statistics.value_counts import ValueCounts
from calipers.steps.base import Layer, QParams

COSTLY = 0.2
"""A static activation that loses more than this is warned of."""


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
        """The error of the output by weight and input together; what is not known counts as 0.

        The rounding errors of a weight and of its input are independent and have a mean of about
        zero: the expectation of their product vanishes, so that energies add up. This is the error
        of a module wherever Calipers names one.

        >>> ModuleCosts(weight=0.03, input=0.04).output_error
        0.05
        """
        return math.hypot(self.weight or 0.0, self.input_error or 0.0)

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


# Of a layer


class Judgement(NamedTuple):
    """What the parameters of a layer cost.

    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param costs: module → what its activations and its output lose, where data ran
    :param codes: module → its packed weight, of those that this process has judged and kept
    """

    errors: dict[str, float]
    costs: dict[str, ModuleCosts]
    codes: dict[str, Tensor]


def judge_layer(
    layer: Layer, qparams: QParams, before: Mapping[str, Tensor], *, keep_codes: bool = False
) -> Judgement:
    """Quantize the weights of a layer, and work out what they and static activations lose.

    :param before: module → its weight before a step rounded it otherwise than to the nearest
    :param keep_codes: whether codes are kept, for a checkpoint to be written
    """
    activations = _judge_activations(layer, qparams)
    mine = Judgement({}, {}, {})
    solved = [module for module in layer.modules if (module.name, "weight") in qparams]
    with layer.ranks.step("judging weights"):
        for module in layer.ranks.my_part(solved, layer.size):
            layer.ranks.check()
            name, weight, spec = module.name, layer.weight(module.name), module.tensor("weight")
            assert spec is not None
            original = before.get(name, weight)
            streams = streams_of(layer.measurements, module, original)
            measured = layer.measurements.get(name, "weight", SENSITIVITY)
            sensitivity = None
            if isinstance(measured, Sensitivity) and measured.num_tokens:
                sensitivity = measured.per_token()
            form = module_format(layer.module(name), module.scheme) if keep_codes else None
            loss, codes = weight_loss(
                weight,
                spec.args,
                qparams[name, "weight"],
                streams,
                before.get(name),
                sensitivity,
                form if form in PACKED else None,
            )
            mine.errors[name] = loss.error
            if codes is not None:
                mine.codes[name] = codes.cpu()
            if streams is not None or sensitivity is not None:
                mine.costs[name] = module_costs(original, loss, streams, activations.get(name, {}))
    costs = {name: asdict(cost) for name, cost in mine.costs.items()}
    of_activations = {name: ModuleCosts(tensors=each) for name, each in activations.items()}
    everything = Judgement({}, of_activations, mine.codes)
    for errors, theirs in layer.ranks.share((mine.errors, costs)):
        everything.errors.update(errors)
        everything.costs.update({n: ModuleCosts.from_dict(cost) for n, cost in theirs.items()})
    return everything


def _judge_activations(layer: Layer, qparams: QParams) -> dict[str, dict[str, ActivationCost]]:
    """Return module → static activation → its cost."""
    counted: list[tuple[ModuleSpec, TensorSpec, ValueCounts]] = []
    for module in layer.modules:
        for tensor in module.tensors:
            counts = layer.measurements.get(module.name, tensor.base_name, COUNTS)
            is_static = (module.name, tensor.base_name) in qparams
            if is_static and isinstance(counts, ValueCounts) and counts.fields():
                counted.append((module, tensor, counts))
    mine: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    with layer.ranks.step("judging activations"):
        for module, tensor, counts in layer.ranks.my_part(counted, lambda _: 1):
            chosen = qparams[module.name, tensor.base_name]
            cost = activation_cost(counts, counts.is_exact, tensor.args, chosen)
            if cost is not None:
                mine[module.name][tensor.base_name] = asdict(cost)
    costs: dict[str, dict[str, ActivationCost]] = defaultdict(dict)
    for theirs in layer.ranks.share(dict(mine)):
        for name, tensors in theirs.items():
            costs[name].update({base: ActivationCost(**cost) for base, cost in tensors.items()})
    return costs


def streams_of(measurements: Measurements, module: ModuleSpec, weight: Tensor) -> Streams | None:
    """Return what went through a Linear module; None if nothing did."""
    inputs = measurements.get(module.name, "input", IMPORTANCE)
    inputs = inputs or measurements.get(module.name, "input", SQUARES)
    return Streams.of(inputs, measurements.get(module.name, "output", SQUARES), weight.detach())


# Of the output of a module


def module_costs(
    weight: Tensor,
    loss: WeightLoss,
    streams: Streams | None,
    tensors: dict[str, ActivationCost],
) -> ModuleCosts:
    """Return what the output of a module loses by its weight, and by its static input."""
    if streams is None or loss.output is None:
        return ModuleCosts(tensors=tensors, loss=loss.loss)
    by_weight = relative_error(loss.output, streams.output)
    seen = tensors.get("input")
    if seen is None:
        return ModuleCosts(by_weight, tensors=tensors, loss=loss.loss)
    columns = sum_of_squares(weight.detach()).cpu()
    return ModuleCosts(by_weight, *_input_errors(seen, streams, columns), tensors, loss.loss)


def _input_errors(
    seen: ActivationCost, streams: Streams, columns: Tensor
) -> tuple[float, float | None]:
    """Return the error of the output by that of the input: of all values, and of typical ones.

    :param columns: Σw² of each column of the weight
    """
    x = streams.energies
    total = float(x.sum())
    alone = float((columns * x).sum())  # E‖y‖² if channels were independent of each other
    if not alone:
        return 0.0, 0.0
    gain = streams.output / alone
    error = seen.error**2 * total
    in_largest = _concentrated(error * seen.error_in_largest, x)
    elsewhere = error * (1 - seen.error_in_largest)
    lost = in_largest + _spread(elsewhere, x - in_largest)
    whole = relative_error(_passed_on(lost, x, columns, gain), streams.output)
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
