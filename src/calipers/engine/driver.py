"""From what was measured to changes: steps are asked in turn, and what they lose is judged."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from calipers.calibration.coverage import Coverage
from calipers.errors import CalipersWarning, shortened
from calipers.judging.costs import ModuleCosts
from calipers.judging.layers import judge_layer
from calipers.measurements import Measurements
from calipers.numerics.qparams import fake_quantize
from calipers.numerics.tensors import digest_of
from calipers.planning.plan import Plan
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import Ranks
from calipers.statistics.base import Statistic
from calipers.steps.feedback import CurvatureCache
from calipers.steps.layer import Changes, Layer, QParams
from calipers.steps.unseen import settle_unseen


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
