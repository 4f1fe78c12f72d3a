"""The parameters of tensors, found from what was measured; work and results are shared by ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from calipers.kernels.memory import Freed
from calipers.kernels.threads import in_threads
from calipers.numerics.layout import has_global_scale
from calipers.observers import Observer, QParamsDict
from calipers.planning.specs import IMPORTANCE, OBSERVER, ModuleSpec
from calipers.statistics.base import Statistic
from calipers.steps.layer import Layer
from calipers.topology import names as topology

_SMALL = 1 << 20  # numbers of weights that are solved beside others
Solved = dict[tuple[str, str], QParamsDict]
Group = tuple[ModuleSpec, ...]


def solve_activations(layer: Layer) -> Solved:
    """Ask the observers of activations for the parameters of what they saw."""
    mine: Solved = {}
    with layer.ranks.step("working out the parameters of activations"):
        for module in layer.modules:
            for tensor in module.tensors:
                seen = layer.measurements.get(module.name, tensor.base_name, OBSERVER)
                if isinstance(seen, Observer) and seen.has_statistics:
                    mine[module.name, tensor.base_name] = seen.get_qparams()
    # An observer that remembers its last value only differs from process to process.
    found: Solved = {}
    for theirs in reversed(layer.ranks.share(mine)):
        found |= theirs
    return found


def solve_weights(layer: Layer) -> Solved:
    """Find the parameters of weights; those that share a global scale are solved together."""
    mine: Solved = {}
    with layer.ranks.step("working out the parameters of weights"):
        fused = fused_groups(layer.modules)
        sizes = {group: sum(map(layer.size, group)) for group in fused}
        groups = layer.ranks.my_part(fused, lambda group: sizes[group])
        small = [group for group in groups if sizes[group] <= _SMALL]
        large = [group for group in groups if sizes[group] > _SMALL]
        solve = partial(_solve_group, layer)
        with in_threads(solve, small) as solutions:
            for _ in counted_groups(layer, small, "choosing scales"):
                mine |= next(solutions)
        freed = Freed()
        for group in counted_groups(layer, large, "choosing scales"):
            mine |= solve(group)
            freed.count(sum(layer.weight(module.name).nbytes for module in group))
    found: Solved = {}
    for theirs in layer.ranks.share(mine):
        found |= theirs
    return found


def _solve_group(layer: Layer, group: Group) -> Solved:
    weights = {module: layer.weight(module.name) for module in group}
    inputs = {module: layer.measurements.get(module.name, "input", IMPORTANCE) for module in group}
    return observed(layer, weights, inputs)


def observed(
    layer: Layer,
    weights: Mapping[ModuleSpec, Tensor],
    inputs: Mapping[ModuleSpec, Statistic | None],
) -> Solved:
    """Show weights to their observers, and return the parameters; they may share a global scale.

    :param inputs: what is known of the inputs of each
    """
    observers = {module: _observer_of(layer, module) for module in weights}
    if len(observers) > 1:
        Observer.fuse(list(observers.values()))
    for module, observer in observers.items():
        observer.inputs = inputs[module]
        observer(weights[module])
    return {(module.name, "weight"): each.get_qparams() for module, each in observers.items()}


def _observer_of(layer: Layer, module: ModuleSpec) -> Observer:
    spec = module.tensor("weight")
    assert spec is not None
    assert spec.observer is not None
    observer = spec.observer.build(module.name)
    if module.name in layer.unseen:
        observer.fall_back_silently()  # coverage says it, once for all
    return observer


def fused_groups(modules: Sequence[ModuleSpec]) -> list[Group]:
    """Put modules together whose weights share a global scale; others stand alone."""
    quantized = {module.name: spec for module in modules if (spec := module.tensor("weight"))}
    sharing = {name for name, spec in quantized.items() if has_global_scale(spec.args)}
    together = {
        name: group for group in topology.fused_groups(sharing, complete=True) for name in group
    }
    by_name = {module.name: module for module in modules}
    groups = dict.fromkeys(together.get(name, (name,)) for name in quantized)
    return [tuple(by_name[name] for name in group) for group in groups]


def counted_groups(layer: Layer, groups: list[Group], what: str) -> Iterator[Group]:
    """Go through groups of weights and show how far this is."""
    if not groups:
        return
    total = sum(map(len, groups))
    with layer.progress.counting(what, total, "weights") as add:
        for group in groups:
            layer.ranks.check()
            yield group
            add(len(group))
