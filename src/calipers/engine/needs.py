"""What a plan needs: memory for statistics; for error feedback, also runs of the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from calipers.planning.plan import Plan, Propagation
from calipers.planning.specs import ModuleSpec
from calipers.topology.model import Topology
from calipers.topology.names import fused_groups, groups_side_by_side

# Bytes for each element of a Hessian, (columns, columns), as solvers/gptq.py works.
_SUM = 8  # float64
_WORK = 44  # at the factorisation: five of float64 and a result of float32
_KEPT = 12  # a root and a Hessian that the next inputs may share

_OF_HALVES = 3  # statistics: of either half of the data and, in the end, of both


@dataclass(frozen=True)
class FeedbackNeeds:
    """What a plan with error feedback needs.

    :param propagation: what layers are calibrated on
    :param passes: how often the data runs through a layer, at most; most of these runs end early
    :param hessians: bytes of the Hessians at a time, layer by layer, and of the work on them
    :param hessians_at_once: the same where the whole model runs at once; None where it cannot
    """

    propagation: Propagation
    passes: int
    hessians: int
    hessians_at_once: int | None = None


def feedback_needs(model: torch.nn.Module, plan: Plan) -> FeedbackNeeds | None:
    """Say what the error feedback of a plan needs; None where it has none.

    Which modules have the same input is told by their names, as inference engines do.
    """
    if not any(map(_matrices, plan.modules)):
        return None
    layers, outside = _by_layer(model, plan)
    if plan.propagation == "float":
        most = max(map(hessian_bytes, (*layers, outside)))
        return FeedbackNeeds(plan.propagation, 1, most, hessian_bytes(plan.modules))
    stages = [_stages(layer) for layer in layers]
    streams = 2 if plan.propagation == "both" else 1
    passes = streams * (max(map(len, stages), default=0) + 1)  # the last one goes on to the next
    at_a_time = (*(stage for layer in stages for stage in layer), outside)
    return FeedbackNeeds(plan.propagation, passes, max(map(hessian_bytes, at_a_time)))


def statistics_bytes(model: PreTrainedModel, plan: Plan) -> int:
    """Estimate the memory that statistics take when data runs through the whole model.

    Which modules have the same input, which is measured once, is told by their names.
    """
    config: Any = model.config.get_text_config()
    heads = {"q": getattr(config, "num_attention_heads", None) or 1}
    many = getattr(config, "num_key_value_heads", None) or heads["q"]
    heads |= {"k": many, "v": many}
    inputs = Topology.of(model).shared_inputs(plan.names)
    sharing = {name: group for group in inputs for name in group}
    sizes: dict[object, int] = {}
    for name, requirements in plan.requirements(with_costs=plan.needs_data):
        module: Any = model.get_submodule(name)
        for each in requirements:
            statistic, base_name = each.create(name), each.base_name
            side = "out_features" if base_name == "output" else "in_features"
            channels = getattr(module, side, None) or 0
            reader = sharing[name] if base_name == "input" else name
            copies = _OF_HALVES if each.in_halves else 1
            key = reader, base_name, str(statistic.configuration())
            sizes[key] = copies * statistic.expected_bytes(channels, heads.get(base_name, 1))
    return sum(sizes.values())


def _by_layer(
    model: torch.nn.Module, plan: Plan
) -> tuple[list[list[ModuleSpec]], list[ModuleSpec]]:
    """Return the modules of each decoder layer, and those outside of them."""
    topology = Topology.of(model)
    layers: dict[str, list[ModuleSpec]] = {layer: [] for layer in topology.layers}
    outside: list[ModuleSpec] = []
    for module in plan.modules:
        layer = topology.layer_of(module.name)
        (outside if layer is None else layers[layer]).append(module)
    return list(layers.values()), outside


def _stages(modules: Iterable[ModuleSpec]) -> list[list[ModuleSpec]]:
    """Put Linear modules together that are calibrated together, by their names."""
    linears = {module.name: module for module in modules if module.kind == "linear"}
    return [[linears[name] for name in group] for group in groups_side_by_side(linears)]


def _matrices(module: ModuleSpec) -> int:
    """Return how many sums of products of its inputs the error feedback of a module takes, at most.

    One of them is as long as its outputs are many, where they are added to a residual stream.
    """
    weight = module.tensor("weight")
    gathered = None if weight is None else weight.gathered
    return 0 if gathered is None or module.columns is None else len(gathered.fields) - 1


def hessian_bytes(modules: Sequence[ModuleSpec]) -> int:
    """Return what Hessians take that are gathered together, and solved one after another."""
    sizes: list[int] = []
    works: list[int] = []
    for readers in grouped_by_input(filter(_matrices, modules)):
        elements = (readers[0].columns or 0) ** 2
        sizes.append(max(map(_matrices, readers)) * elements * _SUM)
        works.append(elements * (_WORK + _KEPT * bool(works)))
    return sum(sizes) + max(works, default=0)


def grouped_by_input(modules: Iterable[ModuleSpec]) -> list[list[ModuleSpec]]:
    """Put Linear modules together that have the same input, by their names."""
    linears = {module.name: module for module in modules if module.kind == "linear"}
    return [[linears[name] for name in group] for group in fused_groups(linears)]
