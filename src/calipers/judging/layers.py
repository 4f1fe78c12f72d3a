"""What the parameters of a layer cost, worked out from what was measured of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from calipers.judging.activations import activation_cost
from calipers.judging.costs import ActivationCost, ModuleCosts
from calipers.judging.outputs import module_costs
from calipers.judging.streams import Streams
from calipers.judging.weights import weight_loss
from calipers.measurements import Measurements
from calipers.planning.specs import (
    COUNTS,
    IMPORTANCE,
    SENSITIVITY,
    SQUARES,
    ModuleSpec,
)
from calipers.statistics.sums import Sensitivity
from calipers.statistics.value_counts import ValueCounts
from calipers.steps.base import Layer, QParams


def judge_layer(
    layer: Layer, qparams: QParams, before: Mapping[str, Tensor]
) -> tuple[dict[str, float], dict[str, ModuleCosts]]:
    """Return the error of each weight, and the costs of each module where data ran.

    :param before: module → its weight before a step rounded it otherwise than to the nearest
    """
    activations = _judge_activations(layer, qparams)
    return _judge_weights(layer, qparams, before, activations)


def _judge_activations(layer: Layer, qparams: QParams) -> dict[str, ModuleCosts]:
    """Work out what the parameters of static activations make of all that was seen."""
    counted = [
        (module, tensor, counts)
        for module in layer.modules
        for tensor in module.tensors
        if (module.name, tensor.base_name) in qparams
        and (counts := _counts(layer.measurements, module.name, tensor.base_name)) is not None
    ]
    mine: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
    with layer.ranks.step("judging activations"):
        for module, tensor, counts in layer.ranks.my_part(counted, lambda _: 1):
            found = qparams[module.name, tensor.base_name]
            cost = activation_cost(counts, counts.is_exact, tensor.args, found)
            if cost is not None:
                mine[module.name][tensor.base_name] = asdict(cost)
    costs: dict[str, ModuleCosts] = {}
    for theirs in layer.ranks.share(dict(mine)):
        for name, tensors in theirs.items():
            known = costs.get(name, ModuleCosts())
            added = {base: ActivationCost(**cost) for base, cost in tensors.items()}
            costs[name] = replace(known, tensors={**known.tensors, **added})
    return costs


def _judge_weights(
    layer: Layer,
    qparams: QParams,
    before: Mapping[str, Tensor],
    known: dict[str, ModuleCosts],
) -> tuple[dict[str, float], dict[str, ModuleCosts]]:
    solved = [module for module in layer.modules if (module.name, "weight") in qparams]
    errors: dict[str, float] = {}
    costs: dict[str, dict[str, Any]] = {}
    with layer.ranks.step("judging weights"):
        for module in layer.ranks.my_part(solved, layer.size):
            layer.ranks.check()
            weight, spec = layer.weight(module.name), module.tensor("weight")
            assert spec is not None
            original = before.get(module.name, weight)
            streams = streams_of(layer.measurements, module, original)
            sensitivity = _sensitivity(layer.measurements, module.name)
            loss = weight_loss(
                weight,
                spec.args,
                qparams[module.name, "weight"],
                streams,
                before.get(module.name),
                sensitivity,
            )
            errors[module.name] = loss.error
            if streams is not None or sensitivity is not None:
                tensors = known.get(module.name, ModuleCosts()).tensors
                costs[module.name] = asdict(module_costs(original, loss, streams, tensors))
    all_errors: dict[str, float] = {}
    for error, cost in layer.ranks.share((errors, costs)):
        all_errors |= error
        known |= {name: ModuleCosts.from_dict(each) for name, each in cost.items()}
    return all_errors, known


def _counts(measurements: Measurements, name: str, base_name: str) -> ValueCounts | None:
    """Return how often each value of a tensor occurred, if anything was counted."""
    found = measurements.get(name, base_name, COUNTS)
    return found if isinstance(found, ValueCounts) and found.fields() else None


def _sensitivity(measurements: Measurements, name: str) -> Tensor | None:
    """Return how much the loss depends on each column of a weight, if that was measured."""
    found = measurements.get(name, "weight", SENSITIVITY)
    return found.per_token() if isinstance(found, Sensitivity) and found.num_tokens else None


def streams_of(measurements: Measurements, module: ModuleSpec, weight: Tensor) -> Streams | None:
    """Return what went through a Linear module; None if nothing did."""
    inputs = measurements.get(module.name, "input", IMPORTANCE)
    inputs = inputs or measurements.get(module.name, "input", SQUARES)
    return Streams.of(inputs, measurements.get(module.name, "output", SQUARES), weight.detach())
