"""The loop over the parts of a model: each is solved, judged, and handed to a sink."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from calipers.calibration.coverage import Coverage, settle_unseen
from calipers.checkpoint.auxiliary_files import source_folder
from calipers.engine.applying import check_changes
from calipers.errors import CalipersWarning, shortened
from calipers.judging.costs import ModuleCosts, report_costs
from calipers.judging.layers import judge_layer
from calipers.measurements import Measurements
from calipers.notebook import NotebookView
from calipers.numerics.qparams import fake_quantize
from calipers.numerics.tensors import digest_of
from calipers.planning.plan import Plan
from calipers.recipes import Recipe
from calipers.runtime.progress import Progress
from calipers.runtime.ranks import Ranks
from calipers.statistics.base import Statistic
from calipers.steps.base import Changes, Layer, QParams
from calipers.steps.gptq import CurvatureCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Solution:
    """What was solved so far.

    :param plan: the plan, as it was carried out
    :param changes: what becomes of the model
    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param costs: module → what its static activations and its output lose
    :param pipeline: how data ran, or where what was known of it came from
    :param samples: how many samples were seen, in all processes; ``tokens``: how many tokens
    :param forward_dtype: in which the model computed; None: it did not
    """

    plan: Plan
    coverage: Coverage
    changes: Changes = field(default_factory=Changes)
    errors: dict[str, float] = field(default_factory=dict)
    costs: dict[str, ModuleCosts] = field(default_factory=dict)
    pipeline: str = "datafree"
    samples: int = 0
    tokens: int = 0
    forward_dtype: torch.dtype | None = None

    @property
    def qparams(self) -> QParams:
        """(module, tensor) → its parameters."""
        return self.changes.qparams

    def as_notes(self) -> dict[str, Any]:
        """Return what the checkpoint says about how it was made."""
        dtype = self.forward_dtype
        return {
            "pipeline": self.pipeline,
            "forward_dtype": None if dtype is None else str(dtype).removeprefix("torch."),
            "samples": self.samples,
            "tokens": self.tokens,
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

    def solve(self, names: Iterable[str]) -> dict[tuple[str, str], Tensor]:
        """Solve some modules. All processes call this with the same names.

        Returns the tensors they compute with from then on, where later ones see their effect.
        """
        names = tuple(dict.fromkeys(names))
        self.prepare(names)
        layer, changes = self.solve_prepared(names)
        self.solution.changes = self.solution.changes.joined(changes)
        return {} if self.solution.plan.propagation == "float" else _propagated(layer, changes)

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
            mine = layer.of_step(label)
            new = step.solve(mine)
            check_changes(mine, label, new)
            rounded = (name for name, local in new.tensors if local == "weight")
            before |= {n: layer.weight(n) for n in rounded if (n, "weight") in new.qparams}
            changes = changes.joined(new)
            layer = replace(layer, new_tensors=changes.tensors)
        errors, costs = judge_layer(layer, changes.qparams, before)
        self.solution.changes = self.solution.changes.joined(Changes(notes=changes.notes))
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


def _propagated(layer: Layer, changes: Changes) -> dict[tuple[str, str], Tensor]:
    """Return the tensors of a layer that modules behind it see in their inputs."""
    tensors = dict(changes.tensors)
    for module in layer.modules:
        spec, qparams = module.tensor("weight"), changes.qparams.get((module.name, "weight"))
        if spec is not None and qparams is not None:
            weight = layer.weight(module.name).detach()
            tensors[module.name, "weight"] = fake_quantize(weight, args=spec.args, **qparams)
    return tensors


def report(solution: Solution) -> None:
    """Warn of what a user must know."""
    for sentence in solution.coverage.sentences():
        warnings.warn(sentence, CalipersWarning, stacklevel=3)
    report_costs(solution.costs)
    notes = solution.changes.notes
    for done in dict.fromkeys(notes.values()):
        told = f"{shortened([name for name in notes if notes[name] == done])}: {done}"
        warnings.warn(CalipersWarning(told), stacklevel=3)


def _total_tokens(statistic: Statistic, *found: tuple[int, str | None]) -> int:
    """Return what a statistic has seen in all processes, of which each tells its count.

    What an earlier run has left in all of them alike was seen once.
    """
    counts, digests = zip(*found, strict=True)
    if digests[0] is not None and len(set(digests)) == 1:
        statistic.mark_common()
        return int(counts[0])
    return sum(counts)


@dataclass(frozen=True)
class OneshotResult(NotebookView):
    """What ``oneshot`` or ``quantize`` did.

    :param model: the frozen model, which computes with fake quantization; where it went from disk
        to disk, its tensors have no values (they are on the meta device)
    :param plan: what was quantized, how, and by which observers
    :param coverage: how many tokens each module saw
    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param recipe: the recipe, as it was carried out
    :param output_dir: where the checkpoint is, if one was asked for
    :param costs: module → what its static activations and its output lose, where data ran
    :param notes: module → what was done otherwise than the recipe says, and why
    :param pipeline: how data ran; ``measurements`` where it had run before, ``datafree`` where none
        was needed
    :param samples: how many samples were seen, and ``tokens`` how many tokens
    :param forward_dtype: in which the model computed; None: it did not
    :param seconds: how long it took
    """

    model: PreTrainedModel
    plan: Plan
    coverage: Coverage
    errors: Mapping[str, float]
    recipe: Recipe
    output_dir: Path | None = None
    costs: Mapping[str, ModuleCosts] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    pipeline: str = "datafree"
    samples: int = 0
    tokens: int = 0
    forward_dtype: torch.dtype | None = None
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        solution: Solution,
        recipe: Recipe,
        output_dir: Path | None,
        seconds: float,
    ) -> OneshotResult:
        """Return what a solution has made of a model."""
        return cls(
            model,
            solution.plan,
            solution.coverage,
            solution.errors,
            recipe,
            output_dir,
            solution.costs,
            solution.changes.notes,
            solution.pipeline,
            solution.samples,
            solution.tokens,
            solution.forward_dtype,
            seconds,
        )

    @property
    def dtype(self) -> torch.dtype:
        """That of the model."""
        return self.model.dtype

    @property
    def source(self) -> Path | None:
        """The folder that the model came from, if it is at hand."""
        return source_folder(self.model)

    def __repr__(self) -> str:
        return f"OneshotResult({', '.join(f'{key}: {fact}' for key, fact in self.facts().items())})"

    def facts(self) -> dict[str, object]:
        """Return what matters most, by its name."""
        facts = {"model": type(self.model).__name__, "plan": self.plan, "coverage": self.coverage}
        if self.errors:
            facts["largest error of a weight"] = f"{max(self.errors.values()):.2%}"
        return facts if self.output_dir is None else {**facts, "written to": self.output_dir}


QuantizeResult = OneshotResult
