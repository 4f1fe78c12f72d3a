"""From what was measured to parameters, tensor by tensor, over all processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from calipers.kernels.memory import Freed
from calipers.modifiers.steps import Layer
from calipers.numerics.layout import has_global_scale
from calipers.observers import FUSED_LAYER_NAMES, Observer, QParamsDict
from calipers.planning.specs import IMPORTANCE, OBSERVER, ModuleSpec

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
    freed = Freed()
    with layer.ranks.step("working out the parameters of weights"):
        fused = fused_groups(layer.modules)
        groups = layer.ranks.my_part(fused, lambda group: sum(map(layer.size, group)))
        for group in _counted(layer, groups):
            layer.ranks.check()
            mine |= _solve_group(layer, group)
            freed.count(sum(layer.weight(module.name).nbytes for module in group))
    found: Solved = {}
    for theirs in layer.ranks.share(mine):
        found |= theirs
    return found


def _solve_group(layer: Layer, group: Group) -> Solved:
    observers = [_observer_of(layer, module) for module in group]
    if len(observers) > 1:
        Observer.fuse(observers)
    for module, observer in zip(group, observers, strict=True):
        observer(layer.weight(module.name))
    return {
        (module.name, "weight"): observer.get_qparams()
        for module, observer in zip(group, observers, strict=True)
    }


def _observer_of(layer: Layer, module: ModuleSpec) -> Observer:
    """Build the observer of a weight, and tell it what is known of the inputs."""
    spec = module.tensor("weight")
    assert spec is not None
    assert spec.observer is not None
    observer = spec.observer.build(module.name)
    observer.inputs = layer.measurements.get(module.name, "input", IMPORTANCE)
    if module.name in layer.unseen:
        observer.fall_back_silently()  # coverage says it, once for all
    return observer


def fused_groups(modules: Sequence[ModuleSpec]) -> list[Group]:
    """Put modules together whose weights share a global scale; others stand alone."""
    siblings: dict[str, dict[str, ModuleSpec]] = defaultdict(dict)
    quantized = {module: spec for module in modules if (spec := module.tensor("weight"))}
    for module, spec in quantized.items():
        parent, _, name = module.name.rpartition(".")
        if has_global_scale(spec.args):
            siblings[parent][name] = module
    group_of: dict[str, Group] = {}
    for found in siblings.values():
        for names in FUSED_LAYER_NAMES:
            if all(name in found for name in names):
                group = tuple(module for name, module in found.items() if name in names)
                group_of |= {module.name: group for module in group}
    groups = [group_of.get(module.name, (module,)) for module in quantized]
    return list(dict.fromkeys(groups))


def _counted(layer: Layer, groups: list[Group]) -> Iterator[Group]:
    """Go through groups of weights and show how far this is."""
    if not groups:
        return
    total = sum(map(len, groups))
    with layer.progress.counting("choosing scales", total, "weights") as add:
        for group in groups:
            yield group
            add(len(group))
