"""From what was measured to changes: steps are asked in turn, observers for parameters."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calipers.calibration.coverage import Coverage
from calipers.calibration.progress import Progress
from calipers.calibration.ranks import Ranks, digest_of
from calipers.errors import CalipersWarning, shortened
from calipers.kernels.memory import Freed
from calipers.kernels.threads import in_threads
from calipers.measurements import Measurements
from calipers.modifiers.costs import ModuleCosts
from calipers.modifiers.judging import judge_layer
from calipers.modifiers.steps import Changes, Layer, QParams
from calipers.modifiers.unseen import settle_unseen
from calipers.numerics.layout import has_global_scale
from calipers.numerics.qparams import fake_quantize
from calipers.observers import FUSED_LAYER_NAMES, Observer, QParamsDict
from calipers.planning.plan import Plan
from calipers.planning.specs import IMPORTANCE, OBSERVER, ModuleSpec
from calipers.statistics.base import Statistic

if TYPE_CHECKING:
    from calipers.modifiers.feedback import CurvatureCache

_SMALL = 1 << 20  # numbers of weights that are solved beside others
Solved = dict[tuple[str, str], QParamsDict]
Group = tuple[ModuleSpec, ...]


@dataclass
class Solution:
    """What was solved so far.

    :param plan: the plan, as it was carried out
    :param changes: what becomes of the model
    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param costs: module → what its static activations and its output lose
    """

    plan: Plan
    coverage: Coverage
    changes: Changes = field(default_factory=Changes)
    errors: dict[str, float] = field(default_factory=dict)
    costs: dict[str, ModuleCosts] = field(default_factory=dict)

    @property
    def qparams(self) -> QParams:
        """(module, tensor) → its parameters."""
        return self.changes.qparams

    def as_notes(
        self, pipeline: str, samples: int, tokens: int, dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Return what the checkpoint says about how it was made.

        :param pipeline: how data ran, or where what was known of it came from
        :param dtype: in which the model computed; None: it did not
        """
        return {
            "pipeline": pipeline,
            "forward_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            "samples": samples,
            "tokens": tokens,
            "coverage": self.coverage.as_dict(),
            "weight_errors": self.errors,
            "costs": {name: asdict(each) for name, each in self.costs.items()},
            **({"notes": dict(self.changes.notes)} if self.changes.notes else {}),
        }


@dataclass(frozen=True)
class StepDriver:
    """Solves modules as soon as their data has run through, step after step.

    :param curvatures: factorised Hessians, shared with drivers that solve the same modules
    """

    model: torch.nn.Module
    measurements: Measurements
    solution: Solution
    ranks: Ranks
    progress: Progress
    curvatures: CurvatureCache | None = None

    def solve(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Solve some modules. All processes call this with the same names.

        Returns the weights they compute with from then on, where later ones see their effect.
        """
        names = tuple(dict.fromkeys(names))
        self.prepare(names)
        layer, changes = self.solve_prepared(names)
        self.solution.changes = self.solution.changes.joined(changes)
        return {} if self.solution.plan.propagation == "float" else dict(_quantized(layer, changes))

    def prepare(self, names: tuple[str, ...]) -> None:
        """Settle what all processes have seen of some modules, and what becomes of the unseen."""
        self._count_tokens(names)
        self.ranks.merge(self.measurements.of(names))
        self._settle_unseen(set(names))

    def solve_prepared(self, names: tuple[str, ...]) -> tuple[Layer, Changes]:
        """Solve some modules, judge what was found, and forget what was measured of them.

        Returns what becomes of them, and the layer as the steps have left it.
        """
        layer = self._layer(names)
        changes = Changes()
        before: dict[str, Tensor] = {}
        for label, step in self.solution.plan.steps.items():
            new = step.solve(layer.of_step(label))
            rounded = (name for name in new.weights if (name, "weight") in new.qparams)
            before |= {name: layer.weight(name) for name in rounded}
            changes = changes.joined(new)
            layer = replace(layer, new_weights=changes.weights)
        errors, costs = judge_layer(layer, changes.qparams, before)
        self.solution.errors |= errors
        self.solution.costs |= costs
        self.measurements.forget(names)
        return layer, changes

    def _layer(self, names: tuple[str, ...]) -> Layer:
        wanted, solution = set(names), self.solution
        modules = tuple(module for module in solution.plan.modules if module.name in wanted)
        unseen = {name: done for name, done in solution.coverage.applied.items() if name in wanted}
        return Layer(
            self.model,
            modules,
            names,
            self.measurements,
            self.ranks,
            self.progress,
            unseen,
            curvatures=self.curvatures,
        )

    def _count_tokens(self, names: tuple[str, ...]) -> None:
        """Note what each module that needs data has seen, in all processes.

        The needed statistic that saw least counts.
        """
        needed = {name: self.measurements.needed(name) for name in names}
        mine = [
            [(each.num_tokens, self._left_digest(name, each)) for each in statistics]
            for name, statistics in needed.items()
        ]
        everywhere = self.ranks.share(mine)
        for (name, statistics), *found in zip(needed.items(), *everywhere, strict=True):
            totals = map(_total_tokens, statistics, *found)
            if statistics:
                self.solution.coverage.tokens[name] = min(totals)

    def _left_digest(self, name: str, statistic: Statistic) -> str | None:
        """Return by what sums that an earlier run has left are known to be the same."""
        is_left = self.measurements.is_from_earlier_run(name, statistic)
        return digest_of(statistic.fields().items()) if is_left else None

    def _settle_unseen(self, names: set[str]) -> None:
        plan, coverage = self.solution.plan, self.solution.coverage
        modules = [module for module in plan.modules if module.name in names]
        changed = settle_unseen(modules, coverage, self.measurements, self.ranks)
        if changed:
            everything = tuple(changed.get(module.name, module) for module in plan.modules)
            self.solution.plan = replace(plan, modules=everything)


def _quantized(layer: Layer, changes: Changes) -> Iterator[tuple[str, Tensor]]:
    """Return what becomes of the weights of a layer."""
    for module in layer.modules:
        spec, found = module.tensor("weight"), changes.qparams.get((module.name, "weight"))
        if spec is not None and found is not None:
            weight = layer.weight(module.name).detach()
            yield module.name, fake_quantize(weight, args=spec.args, **found)
        elif module.name in changes.weights:
            yield module.name, changes.weights[module.name]


def report_coverage(coverage: Coverage) -> None:
    """Warn of what a user must know."""
    for sentence in coverage.sentences():
        warnings.warn(sentence, CalipersWarning, stacklevel=3)


def _total_tokens(statistic: Statistic, *found: tuple[int, str | None]) -> int:
    """Return what a statistic has seen in all processes, of which each tells its count.

    What an earlier run has left in all of them alike was seen once.
    """
    counts, digests = zip(*found, strict=True)
    if digests[0] is not None and len(set(digests)) == 1:
        statistic.mark_common()
        return int(counts[0])
    return sum(counts)


def report_notes(notes: Mapping[str, str]) -> None:
    """Warn of what was done otherwise than the recipe says."""
    for done in dict.fromkeys(notes.values()):
        names = [name for name, each in notes.items() if each == done]
        told = f"{shortened(names)}: {done}"
        warnings.warn(CalipersWarning(told), stacklevel=3)


# Parameters, tensor by tensor, over all processes


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
