"""Drives the steps of a plan: what was measured of some modules becomes changes to them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from calipers.calibration.coverage import Coverage
from calipers.calibration.progress import Progress
from calipers.calibration.ranks import Ranks
from calipers.errors import CalipersWarning
from calipers.measurements import Measurements
from calipers.modifiers.costs import ModuleCosts
from calipers.modifiers.judging import judge_layer
from calipers.modifiers.steps import Changes, Layer, QParams
from calipers.modifiers.unseen import settle_unseen
from calipers.planning.plan import Plan


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


@dataclass(frozen=True)
class StepDriver:
    """Solves modules as soon as their data has run through, step after step."""

    model: torch.nn.Module
    measurements: Measurements
    solution: Solution
    ranks: Ranks
    progress: Progress

    def solve(self, names: Iterable[str]) -> None:
        """Solve some modules. All processes call this with the same names."""
        names = tuple(dict.fromkeys(names))
        self._count_tokens(names)
        self.ranks.merge(self.measurements.of(names))
        self._settle_unseen(set(names))
        layer = self._layer(names)
        changes = Changes()
        for label, step in self.solution.plan.steps.items():
            changes = changes.joined(step.solve(layer.of_step(label)))
            layer = replace(layer, new_weights=changes.weights)
        self.solution.changes = self.solution.changes.joined(changes)
        errors, costs = judge_layer(layer, changes.qparams)
        self.solution.errors |= errors
        self.solution.costs |= costs
        self.measurements.forget(names)

    def _layer(self, names: tuple[str, ...]) -> Layer:
        wanted, solution = set(names), self.solution
        modules = tuple(module for module in solution.plan.modules if module.name in wanted)
        unseen = {name: done for name, done in solution.coverage.applied.items() if name in wanted}
        return Layer(
            self.model, modules, names, self.measurements, self.ranks, self.progress, unseen
        )

    def _count_tokens(self, names: tuple[str, ...]) -> None:
        """Note what each module that needs data has seen, in all processes."""
        mine = {name: self.measurements.tokens(name) for name in names}
        wanted = [name for name, tokens in mine.items() if tokens is not None]
        everywhere = self.ranks.share([mine[name] or 0 for name in wanted])
        totals = [sum(counts) for counts in zip(*everywhere, strict=True)]
        self.solution.coverage.tokens |= dict(zip(wanted, totals, strict=True))

    def _settle_unseen(self, names: set[str]) -> None:
        plan, coverage = self.solution.plan, self.solution.coverage
        modules = [module for module in plan.modules if module.name in names]
        changed = settle_unseen(modules, coverage, self.measurements, self.ranks)
        if changed:
            everything = tuple(changed.get(module.name, module) for module in plan.modules)
            self.solution.plan = replace(plan, modules=everything)


def report_coverage(coverage: Coverage) -> None:
    """Warn of what a user must know."""
    for sentence in coverage.sentences():
        warnings.warn(sentence, CalipersWarning, stacklevel=3)
