"""What would become of a model, and what that takes, worked out without its weights."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from calipers.checkpoint.compression import size_when_stored, sizes_of_module
from calipers.checkpoint.state import module_state, offloaded_tensors, tied_names, unquantized_ties
from calipers.engine.loop import give_schemes
from calipers.engine.presets import scheme_runs_on
from calipers.options import CalibrationOptions
from calipers.planning.plan import Plan, Propagation
from calipers.planning.specs import ModuleSpec
from calipers.recipes import Recipe
from calipers.recipes.compiling import plan_for
from calipers.topology.model import Topology
from calipers.topology.names import fused_groups, groups_side_by_side

# Bytes for each element of a Hessian, (columns, columns), as solvers/gptq.py works.
_SUM = 8  # float64
_WORK = 44  # at the factorisation: five of float64 and a result of float32
_KEPT = 12  # a root and a Hessian that the next inputs may share
_OF_FOLDS = 1 + CalibrationOptions().folds  # statistics: of each, and in the end of all data


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
    if not any(map(hessians_of, plan.modules)):
        return None
    topology = Topology.of(model)
    by_layer: dict[str | None, list[ModuleSpec]] = {None: [], **{x: [] for x in topology.layers}}
    for module in plan.modules:
        by_layer[topology.layer_of(module.name)].append(module)
    outside, *layers = by_layer.values()
    if plan.propagation == "float":
        most = max(map(hessian_bytes, (*layers, outside)))
        return FeedbackNeeds(plan.propagation, 1, most, hessian_bytes(plan.modules))
    at_a_time, longest = [outside], 0
    for modules in layers:
        linears = {module.name: module for module in modules if module.kind == "linear"}
        stages = groups_side_by_side(linears)
        # A layer that is tuned is judged afterwards: all its Hessians are kept until then.
        together = [tuple(linears)] if plan.tunes_layers else stages
        at_a_time += [[linears[name] for name in names] for names in together]
        longest = max(longest, len(stages))
    streams = 2 if plan.propagation == "both" else 1
    passes = streams * (longest + 1)  # the last one goes on to the next layer
    return FeedbackNeeds(plan.propagation, passes, max(map(hessian_bytes, at_a_time)))


def hessian_bytes(modules: Sequence[ModuleSpec]) -> int:
    """Return what Hessians take that are gathered together, and solved one after another."""
    sizes: list[int] = []
    works: list[int] = []
    gathered = {module.name: module for module in modules if hessians_of(module)}
    for names in fused_groups(gathered):  # they have the same input
        readers = [gathered[name] for name in names]
        elements = (readers[0].columns or 0) ** 2
        sums, copies = max(map(hessians_of, readers)) * elements * _SUM, _folds_of(readers[0])
        sizes.append(copies * sums)
        # What the last fold has seen is worked out for the one at work.
        works.append(elements * (_WORK + _KEPT * bool(works)) + (copies > 1) * sums)
    return sum(sizes) + max(works, default=0)


def _folds_of(module: ModuleSpec) -> int:
    """Return how many folds of the data are gathered apart, if nobody says otherwise."""
    weight = module.tensor("weight")
    return CalibrationOptions().folds if weight is not None and weight.in_folds else 1


def hessians_of(module: ModuleSpec) -> int:
    """Return how many sums of products of its inputs the error feedback of a module takes, at most.

    One of them is as long as its outputs are many, where they are added to a residual stream.
    """
    weight = module.tensor("weight")
    gathered = None if weight is None else weight.gathered
    return 0 if gathered is None or module.columns is None else len(gathered.fields) - 1


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
            copies = _OF_FOLDS if each.in_folds else 1
            key = reader, base_name, str(statistic.configuration())
            sizes[key] = copies * statistic.expected_bytes(channels, heads.get(base_name, 1))
    return sum(sizes.values())


@dataclass(frozen=True)
class DryRunRow:
    """A tensor that would be quantized; ``before`` and ``after`` are bytes in the checkpoint.

    :param runs_on: of a weight, where its scheme is known to run, with what it takes there
    """

    module: str
    tensor: str
    format: str
    strategy: str
    observer: str
    data: str
    before: int
    after: int
    runs_on: Mapping[str, str]


@dataclass(frozen=True)
class DryRun:
    """What a recipe would do to a model.

    :param rows: every tensor that would be quantized, in the order of the model
    :param gathered: modules whose inputs would be summed up for whoever comes later
    :param before: bytes of all tensors of the checkpoint as the model is
    :param after: the same when it is quantized
    :param feedback: what error feedback needs; None where there is none
    :param statistics: bytes that statistics take while data runs through the whole model, about
    """

    rows: tuple[DryRunRow, ...]
    gathered: tuple[str, ...]
    needs_data: bool
    before: int
    after: int
    feedback: FeedbackNeeds | None = None
    statistics: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def dry_run(model: PreTrainedModel, recipe: Recipe) -> DryRun:
    """Quantize a model that has no values, and look at what would be stored.

    What is asked for sizes is the code that writes checkpoints. Of modules that are alike, one is
    quantized for all. The model is changed.
    """
    total = size_when_stored(model)
    plan = plan_for(model, recipe)
    needs, memory = feedback_needs(model, plan), statistics_bytes(model, plan)
    ties = tied_names(model)
    alike = _alike(model, plan, ties)
    examples = tuple(module for module in plan.modules if alike[module.name] == module.name)
    before = _sizes(model, examples, ties)
    give_schemes(model, examples)
    left = unquantized_ties(model, ties)
    after = _sizes(model, examples, left)
    change = sum(
        sum(after[example].values()) - sum(before[example].values()) for example in alike.values()
    )
    # Copies that were tied to a weight which is now quantized without them are stored themselves.
    alone = [n for n in ties.keys() - left.keys() if n.rpartition(".")[0] not in plan.names]
    tensors = offloaded_tensors(model) if alone else {}
    change += sum(tensors[name].nbytes for name in alone)
    rows = []
    for (module, tensor), row in zip(plan, plan.rows(), strict=True):
        base, example = tensor.base_name, alike[module.name]
        # What is stored for a tensor: itself, its packed form, its scales.
        stored = [
            sum(s for n, s in sizes[example].items() if n == base or n.startswith(f"{base}_"))
            for sizes in (before, after)
        ]
        targets = scheme_runs_on(module.scheme) if tensor.base_name == "weight" else {}
        rows.append(DryRunRow(**row, before=stored[0], after=stored[1], runs_on=targets))
    return DryRun(
        tuple(rows), tuple(plan.measured), plan.needs_data, total, total + change, needs, memory
    )


def _alike(model: PreTrainedModel, plan: Plan, ties: Mapping[str, str]) -> dict[str, str]:
    """Return for each module the first one of the same form; those with tied tensors are unlike."""
    tied = {name for pair in ties.items() for name in pair}
    first: dict[Hashable, str] = {}
    examples = {}
    for module in plan.modules:
        own = module_state(model.get_submodule(module.name))
        form: Hashable = (
            id(module.scheme),
            module.kind,
            tuple((name, tensor.shape, tensor.dtype) for name, tensor in own.items()),
        )
        if any(f"{module.name}.{name}" in tied for name in own):
            form = module.name
        examples[module.name] = first.setdefault(form, module.name)
    return examples


def _sizes(
    model: PreTrainedModel, modules: Iterable[ModuleSpec], copies: Container[str]
) -> dict[str, dict[str, int]]:
    """Return the bytes of the tensors of some modules; a tied copy takes none."""
    return {
        each.name: {
            tensor: 0 if f"{each.name}.{tensor}" in copies else size
            for tensor, size in sizes_of_module(model.get_submodule(each.name)).items()
        }
        for each in modules
    }
