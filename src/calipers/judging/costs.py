"""What quantization costs: how far static activations, and the outputs of modules, are off.

Every figure is relative, ‖error‖ / ‖whole‖ over all tokens that were seen. An error of the output
is what the weight, or the input, causes by itself while the other stays as it was.
docs/judging.md has the formulas side by side.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.errors import CalipersWarning, counted, shortened
from calipers.judging.activations import (
    ActivationCost,
    activation_cost,
    input_errors,
    relative_error,
)
from calipers.kernels.reductions import sum_of_products, sum_of_squares
from calipers.kernels.rounding import PACKED, Packed, pack_weight
from calipers.measurements import Measurements
from calipers.numerics.layout import row_tiles, scale_rows
from calipers.observers import QParamsDict
from calipers.planning.specs import (
    COUNTS,
    IMPORTANCE,
    SENSITIVITY,
    SQUARES,
    ModuleSpec,
    TensorSpec,
    module_format,
)
from calipers.statistics.base import Statistic
from calipers.statistics.sums import BlockHessians, Sensitivity, SquareSums, TokenSquares
from calipers.statistics.value_counts import ValueCounts
from calipers.steps.base import Layer, QParams

_AT_ONCE = 1 << 20  # weights worked on

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
    :param chosen: what the step that solved it has chosen by data: for error feedback ``damping``
        and ``correction``, in terms of the mean diagonal of the Hessian
    """

    weight: float | None = None
    input: float | None = None
    typical_input: float | None = None
    tensors: dict[str, ActivationCost] = field(default_factory=dict)
    loss: float | None = None
    chosen: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModuleCosts:
        """Return the costs that :func:`dataclasses.asdict` made plain data of.

        >>> ModuleCosts.from_dict({"weight": 0.25, "tensors": {}})
        ModuleCosts(weight=0.25, input=None, typical_input=None, tensors={}, loss=None, chosen={})
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
    by_input = input_errors(seen, streams.energies, streams.output, columns)
    return ModuleCosts(by_weight, *by_input, tensors, loss.loss)


# Of a weight


class Streams(NamedTuple):
    """What went through a module, on average over tokens.

    :param energies: E[x²] of each input channel
    :param blocks: E[x xᵀ] of blocks of channels, if that was gathered
    :param output: E‖y‖²; where outputs were not measured, what inputs and weight tell of it
    """

    energies: Tensor
    blocks: Tensor | None
    output: float

    @classmethod
    def of(
        cls, inputs: Statistic | None, outputs: Statistic | None, weight: Tensor
    ) -> Streams | None:
        """Read statistics of inputs and outputs; None where there is nothing to be read."""
        before, after = _moments(inputs), _moments(outputs)
        if before is None:
            return None
        energies, blocks = before
        streams = cls(energies, blocks, math.nan)
        total = streams.energy_through(weight) if after is None else float(after[0].sum())
        sound = bool(torch.isfinite(energies).all()) and 0 < total < math.inf
        return streams._replace(output=total) if sound else None

    def energy_through(self, matrix: Tensor) -> float:
        """Return E‖M x‖² of a matrix M.

        With the whole of E[x xᵀ] that is exact. With blocks of it, or its diagonal alone, what
        channels of different blocks have in common is left out: it averages out where M is an error
        of rounding, whose entries are independent with a mean of about zero.
        """
        if self.blocks is None:
            return float((sum_of_squares(matrix).cpu() * self.energies).sum())
        # tr(M H Mᵀ) = Σ H ∘ MᵀM, which takes half the products
        parts = torch.split(matrix, self.blocks.shape[-1], dim=1)
        pairs = zip(self.blocks, parts, strict=True)
        return sum(float((sum_of_products(part).cpu() * block).sum()) for block, part in pairs)


def _moments(seen: Statistic | None) -> tuple[Tensor, Tensor | None] | None:
    """Return E[x²] of each channel and, where they were gathered, blocks of E[x xᵀ]."""
    held = {} if seen is None else seen.fields()
    for kind in (SquareSums, BlockHessians, TokenSquares):
        sums, count = kind.reductions
        if sums in held and count in held and int(held[count]):
            mean = held[sums].double().cpu() / int(held[count])
            is_diagonal = mean.ndim == 1
            return (mean, None) if is_diagonal else (mean.diagonal(0, -2, -1).flatten(), mean)
    return None


class WeightLoss(NamedTuple):
    """What a weight loses.

    :param error: ‖Q(W) − W‖ / ‖W‖
    :param output: E‖ΔW x‖², if it is known what went through the module
    :param loss: what the loss of the model gains, in nats per token, if it is known how sensitive
        that is
    """

    error: float
    output: float | None = None
    loss: float | None = None


def weight_loss(
    weight: Tensor,
    args: QuantizationArgs,
    qparams: QParamsDict,
    streams: Streams | None = None,
    before: Tensor | None = None,
    sensitivity: Tensor | None = None,
    form: CompressionFormat | None = None,
) -> tuple[WeightLoss, Tensor | None]:
    """Quantize a weight; return what it loses, 0 for a weight of zeros, and its codes.

    Codes are those of a checkpoint, whose quotients are rounded to the dtype of the weight.

    :param before: what the weight was before it was rounded otherwise than to the nearest
    :param sensitivity: E[(∂L/∂w)²] of each column
    :param form: how codes are stored; None: they are not wanted

    >>> args = QuantizationArgs(num_bits=4, strategy="channel")
    >>> qparams = {"scale": torch.ones(1, 1), "zero_point": torch.zeros(1, 1), "global_scale": None}
    >>> weight = torch.tensor([[3.0, 0.25, -4.0]])
    >>> loss, _ = weight_loss(weight, args, qparams, Streams(torch.ones(3).double(), None, 1.0))
    >>> loss.error == 0.25 / 25.0625**0.5, loss.output
    (True, 0.0625)
    """
    weight = weight.detach()
    if before is None and (streams is None or streams.blocks is None):
        # Errors of columns count by themselves: differences need not be kept.
        packed = _packed(weight, args, qparams, form)
        columns = packed.errors.cpu()
        loss = WeightLoss(
            relative_error(float(columns.sum()), _energy(weight)),
            None if streams is None else float((columns * streams.energies).sum()),
            None if sensitivity is None else float((columns * sensitivity.cpu()).sum()) / 2,
        )
        return loss, packed.codes
    original = weight if before is None else before.detach().to(weight)
    codes: list[Tensor] = []

    def differences() -> Iterator[tuple[Tensor, float]]:
        for rows in row_tiles(weight.shape, args, _AT_ONCE):
            packed = _packed(weight[rows], args, qparams, form, rows)
            assert packed.values is not None
            if packed.codes is not None:
                codes.append(packed.codes)
            values = packed.values.sub_(original[rows])
            energy = packed.errors if before is None else values.double().square()
            yield values, float(energy.sum())

    loss = _summed(differences(), original, streams, sensitivity)
    return loss, torch.cat(codes) if codes else None


def _packed(
    weight: Tensor,
    args: QuantizationArgs,
    qparams: QParamsDict,
    form: CompressionFormat | None,
    rows: slice | None = None,
) -> Packed:
    """Pack a weight, or some rows of it; of those, with the values that codes stand for."""
    scale, zero_point = (qparams[key].to(weight.device) for key in ("scale", "zero_point"))
    global_scale = qparams["global_scale"]
    if rows is not None:
        scale, zero_point = (scale_rows(value, rows, args) for value in (scale, zero_point))
    return pack_weight(
        weight,
        scale.to(weight.dtype),  # as the module holds it
        zero_point,
        None if global_scale is None else global_scale.to(weight.device),
        args,
        form,
        with_values=rows is not None,
    )


def stored_weight_loss(
    parts: Iterable[tuple[Tensor, Tensor]], original: Tensor, streams: Streams | None = None
) -> WeightLoss:
    """Return what a weight has lost in a checkpoint. Infinite where something is not finite.

    :param parts: pairs of its rows: original and stored

    >>> original, stored = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])
    >>> stored_weight_loss([(original, stored)], original)
    WeightLoss(error=0.1, output=None, loss=None)
    """
    differences = (stored.float() - rows.float() for rows, stored in parts)
    return _summed(((rows, _energy(rows)) for rows in differences), original, streams)


def _summed(
    differences: Iterable[tuple[Tensor, float]],
    original: Tensor,
    streams: Streams | None,
    sensitivity: Tensor | None = None,
) -> WeightLoss:
    """Sum up what differences cost, which come as rows with their energy."""
    energy = output = loss = 0.0
    for rows, lost in differences:
        energy += lost
        output += 0.0 if streams is None else streams.energy_through(rows)
        loss += 0.0 if sensitivity is None else _predicted_loss(rows, streams, sensitivity)
    whole = _energy(original)
    if not math.isfinite(energy) or (energy and not whole):
        return WeightLoss(math.inf)
    return WeightLoss(
        relative_error(energy, whole),
        None if streams is None else output,
        None if sensitivity is None else loss,
    )


def _energy(weight: Tensor) -> float:
    return float(sum_of_squares(weight.detach().reshape(-1, weight.shape[-1])).sum())


def _predicted_loss(errors: Tensor, streams: Streams | None, sensitivity: Tensor) -> float:
    """Return ½ Σ Δᵀ F Δ over the rows Δ of the errors of a weight.

    That is the second term of the Taylor series of the loss around the trained weights, hence the
    ½; the first one, the gradient times Δ, averages out over errors without a direction of their
    own. The Fisher information F stands for the second derivatives: the two agree on average where
    the model predicts the data well.

    The diagonal of F is the sensitivity, E[(∂L/∂w)²]. Off it, the gradients of two columns of a row
    go together as far as their inputs do, since ∂L/∂w = g·x. For independent errors that averages
    out. GPTQ makes larger errors that cancel in the output, of which the diagonal alone would
    predict two to three times the loss.
    """
    if streams is None or streams.blocks is None:
        return float((sum_of_squares(errors).cpu() * sensitivity).sum()) / 2
    gains = torch.where(streams.energies > 0, sensitivity / streams.energies, 0.0).sqrt()
    return streams.energy_through(errors * gains.to(errors)) / 2
