"""The parameters of tensors, found from what was measured; work and results are shared by ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from calipers.kernels.resources import FreedMemory, in_threads
from calipers.numerics.layout import has_global_scale
from calipers.observers import QParamsDict
from calipers.observers import spec as observers
from calipers.observers.spec import COUNTS, RANGE, Weight
from calipers.planning.specs import IMPORTANCE, ModuleSpec
from calipers.statistics.base import Statistic
from calipers.steps.base import Layer
from calipers.topology import names as topology

_SMALL = 1 << 20  # numbers of weights that are solved beside others
Solved = dict[tuple[str, str], QParamsDict]
Group = tuple[ModuleSpec, ...]


def solve_activations(layer: Layer) -> Solved:
    """Find the parameters of activations from what was measured of them."""
    mine: Solved = {}
    with layer.ranks.step("working out the parameters of activations"):
        for module in layer.modules:
            for tensor in module.tensors:
                if tensor.base_name == "weight" or tensor.observer is None:
                    continue
                place = module.name, tensor.base_name
                seen = {key: layer.measurements.get(*place, key) for key in (RANGE, COUNTS)}
                qparams = tensor.observer.solve_stream(seen, module.name)
                if qparams is not None:
                    mine[place] = qparams
    # A statistic that remembers its last value only differs from process to process.
    solved: Solved = {}
    for theirs in reversed(layer.ranks.share(mine)):
        solved |= theirs
    return solved


def solve_weights(layer: Layer) -> Solved:
    """Find the parameters of weights; those that share a global scale are solved together."""
    mine: Solved = {}
    with layer.ranks.step("working out the parameters of weights"):
        fused = fused_groups(layer.modules)
        sizes = {group: sum(map(layer.size, group)) for group in fused}
        groups = layer.ranks.my_part(fused, lambda group: sizes[group])
        small = [group for group in groups if sizes[group] <= _SMALL]
        large = [group for group in groups if sizes[group] > _SMALL]

        def solve(group: Group) -> Solved:
            measured = layer.measurements
            inputs = {each: measured.get(each.name, "input", IMPORTANCE) for each in group}
            return solve_group(layer, {each: layer.weight(each.name) for each in group}, inputs)

        with in_threads(solve, small) as solutions:
            for _ in counted_groups(layer, small, "choosing scales"):
                mine |= next(solutions)
        freed = FreedMemory()
        for group in counted_groups(layer, large, "choosing scales"):
            mine |= solve(group)
            freed.count(sum(layer.weight(module.name).nbytes for module in group))
    solved: Solved = {}
    for theirs in layer.ranks.share(mine):
        solved |= theirs
    return solved


def solve_group(
    layer: Layer,
    weights: Mapping[ModuleSpec, Tensor],
    inputs: Mapping[ModuleSpec, Statistic | None],
) -> Solved:
    """Return the parameters of weights, which may share a global scale.

    :param inputs: what is known of the inputs of each
    """
    problems = []
    for module, value in weights.items():
        spec = module.tensor("weight")
        assert spec is not None
        assert spec.observer is not None
        # Coverage tells of modules that saw nothing, once for all.
        is_told = module.name in layer.unseen
        problems.append(Weight(spec.observer, value, inputs[module], module.name, is_told))
    places = [(module.name, "weight") for module in weights]
    return dict(zip(places, observers.solve_weights(problems), strict=True))


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
