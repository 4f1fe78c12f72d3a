"""From what the observers saw to the parameters of each tensor, over all processes."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from compressed_tensors.offload import disable_onloading
from torch import Tensor

from calipers.calibration.costs import ActivationCost, ModuleCosts, activation_cost
from calipers.calibration.coverage import Coverage
from calipers.calibration.distributed import Crew
from calipers.calibration.lifecycle import observe
from calipers.calibration.output_errors import module_costs, weight_loss
from calipers.calibration.plan import Plan, PlannedModule, PlannedTensor
from calipers.calibration.progress import Progress
from calipers.calibration.watching import WatchedModel
from calipers.errors import CalipersWarning, UnseenModulesError
from calipers.kernels.memory import Freed
from calipers.observers import Observer, QParamsDict
from calipers.observers.gathering import GathersInputs

Range = tuple[Tensor, Tensor, Tensor]
"""The least, the largest, and a tensor like those that were seen."""


@dataclass
class Findings:
    """What calibration found.

    :param plan: the plan, as it was carried out
    :param qparams: (module, tensor) → its parameters
    :param errors: module → ‖Q(W) − W‖ / ‖W‖ of its weight
    :param costs: module → what its static activations and its output lose
    :param sums: module → the sums of its inputs that the plan wants left on it
    """

    plan: Plan
    coverage: Coverage
    qparams: dict[tuple[str, str], QParamsDict] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    costs: dict[str, ModuleCosts] = field(default_factory=dict)
    sums: dict[str, dict[str, Tensor]] = field(default_factory=dict)


class Conclusions:
    """Works out parameters module by module, as soon as their data has run through.

    :param findings: where the results go
    """

    def __init__(
        self, watched: WatchedModel, findings: Findings, crew: Crew, progress: Progress
    ) -> None:
        self._watched, self._findings, self._crew = watched, findings, crew
        self._progress = progress

    def conclude(self, names: Iterable[str]) -> None:
        """Work out the parameters of some modules. All processes call this with the same names."""
        names = list(dict.fromkeys(names))
        wanted = set(names)
        modules = [module for module in self._watched.plan.modules if module.name in wanted]
        self._watched.finish()
        self._watched.dismiss(names)
        self._count(names)
        recorded = self._watched.recording.statistics(names)
        self._crew.merge([*self._watched.data_observers(names), *recorded])
        modules = self._settle_unseen(modules)
        for name in wanted & self._watched.gatherers.keys():
            self._findings.sums[name] = self._watched.gatherers[name].gathered()
        self._solve_activations(modules)
        self._judge_activations(modules)
        self._solve_weights(modules)
        self._watched.recording.forget(names)

    # What was seen

    def _count(self, names: list[str]) -> None:
        wanted = [name for name in names if self._watched.data_observers([name])]
        everywhere = self._crew.share([self._watched.tokens(name) for name in wanted])
        totals = [sum(counts) for counts in zip(*everywhere, strict=True)]
        self._findings.coverage.tokens |= dict(zip(wanted, totals, strict=True))

    # What was not seen

    def _settle_unseen(self, modules: list[PlannedModule]) -> list[PlannedModule]:
        coverage = self._findings.coverage
        unseen = [module for module in modules if coverage.tokens.get(module.name) == 0]
        if not unseen:
            return modules
        helpless = [module.name for module in unseen if not self._can_settle(module)]
        if helpless:
            raise UnseenModulesError(helpless, coverage.policy)
        changed = {}
        for module in unseen:
            if coverage.policy == "weights_only":
                changed[module.name] = _weights_only(module)
                coverage.applied[module.name] = "weights only"
            else:
                self._learn_from_peers(module)
                coverage.applied[module.name] = "largest range of its peers"
            self._silence(module)
        plan = self._findings.plan
        everything = tuple(changed.get(module.name, module) for module in plan.modules)
        self._findings.plan = replace(plan, modules=everything)
        return [changed.get(module.name, module) for module in modules]

    def _can_settle(self, module: PlannedModule) -> bool:
        policy = self._findings.coverage.policy
        if policy == "weights_only":
            return module.scheme.weights is not None
        return policy == "peers" and bool(self._findings.coverage.siblings(module.name))

    def _learn_from_peers(self, module: PlannedModule) -> None:
        siblings = self._findings.coverage.siblings(module.name)
        for tensor in module.tensors:
            observer = self._watched.observers.get((module.name, tensor.base_name))
            if observer is None:
                continue
            peers = [self._watched.observers[name, tensor.base_name] for name in siblings]
            if tensor.base_name != "weight":
                united = _united_range(tensor, self._ranges(peers))
                self._watched.observers[module.name, tensor.base_name] = united
            elif isinstance(observer, GathersInputs):
                for name in observer.gathered_fields():
                    setattr(observer, name, sum(getattr(peer, name) for peer in peers))

    def _ranges(self, peers: list[Observer]) -> list[Range]:
        """Return what peers saw in any process: some remember only what they saw in their own."""
        mine = [(*peer.get_range(), peer.observed_like) for peer in peers if peer.has_statistics]
        return [each for theirs in self._crew.share(mine) for each in theirs]

    def _silence(self, module: PlannedModule) -> None:
        """Without importance a weight is judged by plain error: coverage says it, once for all."""
        observer = self._watched.observers.get((module.name, "weight"))
        if isinstance(observer, GathersInputs):
            observer.fall_back_silently()

    # Parameters

    def _solve_activations(self, modules: list[PlannedModule]) -> None:
        mine: dict[tuple[str, str], QParamsDict] = {}
        with self._crew.step("working out the parameters of activations"):
            for tensor in (tensor for module in modules for tensor in module.tensors):
                observer = self._watched.observers.get((tensor.module, tensor.base_name))
                if tensor.base_name != "weight" and observer and observer.has_statistics:
                    mine[tensor.module, tensor.base_name] = observer.get_qparams()
        # An observer that remembers its last value only differs from process to process.
        for found in reversed(self._crew.share(mine)):
            self._findings.qparams |= found

    def _judge_activations(self, modules: list[PlannedModule]) -> None:
        """Work out what the parameters of static activations make of all that was seen."""
        solved = [
            (module.name, tensor)
            for module in modules
            for tensor in module.tensors
            if self._watched.recording.counts(module.name, tensor.base_name)
            and (module.name, tensor.base_name) in self._findings.qparams
        ]
        mine: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)
        with self._crew.step("judging activations"):
            for name, tensor in self._crew.my_part(solved, lambda _: 1):
                qparams = self._findings.qparams[name, tensor.base_name]
                counts = self._watched.recording.counts(name, tensor.base_name)
                cost = counts and activation_cost(*counts, tensor.args, qparams)
                if cost:
                    mine[name][tensor.base_name] = asdict(cost)
        for found in self._crew.share(dict(mine)):
            for name, tensors in found.items():
                known = self._findings.costs.get(name, ModuleCosts())
                added = {base: ActivationCost(**cost) for base, cost in tensors.items()}
                self._findings.costs[name] = replace(known, tensors={**known.tensors, **added})

    def _solve_weights(self, modules: list[PlannedModule]) -> None:
        groups = self._weight_groups(modules)
        mine: dict[tuple[str, str], QParamsDict] = {}
        errors: dict[str, float] = {}
        costs: dict[str, dict[str, Any]] = {}
        freed = Freed()
        with self._crew.step("working out the parameters of weights"):
            for group in self._counted(self._crew.my_part(groups, self._size)):
                self._crew.check()
                observe([self._watched.module(name) for name in group], "weight")
                for name in group:
                    observer = self._watched.observers[name, "weight"]
                    mine[name, "weight"] = observer.get_qparams()
                    weight: Any = self._watched.module(name).weight
                    streams = self._watched.recording.streams(name)
                    loss = weight_loss(weight, observer.args, mine[name, "weight"], streams)
                    errors[name] = loss.error
                    if streams is not None:
                        known = self._findings.costs.get(name, ModuleCosts())
                        costs[name] = asdict(module_costs(weight, loss, streams, known.tensors))
                    freed.count(weight.nbytes)
                self._forget(group)
        self._forget(name for group in groups for name in group)  # also what others solved
        for found, error, cost in self._crew.share((mine, errors, costs)):
            self._findings.qparams |= found
            self._findings.errors |= error
            self._findings.costs |= {name: ModuleCosts.from_dict(c) for name, c in cost.items()}

    def _counted(self, groups: list[list[str]]) -> Iterator[list[str]]:
        """Go through groups of weights and show how far this is."""
        if not groups:
            return
        total = sum(map(len, groups))
        with self._progress.counting("choosing scales", total, "weights") as add:
            for group in groups:
                yield group
                add(len(group))

    def _forget(self, names: Iterable[str]) -> None:
        """Let observers go of the weights and sums they have no more use for."""
        for name in names:
            self._watched.observers[name, "weight"].reset()

    def _weight_groups(self, modules: list[PlannedModule]) -> list[list[str]]:
        """Put modules together whose weights share a global scale."""
        names = {
            self._watched.observers[module.name, "weight"]: module.name
            for module in modules
            if (module.name, "weight") in self._watched.observers
        }
        order = {observer: index for index, observer in enumerate(names)}
        groups, done = [], set()
        for observer in names:
            if observer not in done:
                group = {observer, *observer.fused_with} & names.keys()
                done.update(group)
                groups.append([names[member] for member in sorted(group, key=order.__getitem__)])
        return groups

    def _size(self, group: list[str]) -> int:
        with disable_onloading():
            weights: list[Any] = [self._watched.module(name).weight for name in group]
        return sum(weight.numel() for weight in weights)


def report_coverage(coverage: Coverage) -> None:
    """Warn of what a user must know."""
    for sentence in coverage.sentences():
        warnings.warn(sentence, CalipersWarning, stacklevel=3)


def _weights_only(module: PlannedModule) -> PlannedModule:
    keep = {"input_activations": None, "output_activations": None}
    return replace(module, scheme=module.scheme.model_copy(update=keep, deep=True))


def _united_range(tensor: PlannedTensor, ranges: list[Range]) -> Observer:
    """Return an observer that has seen the largest of some ranges."""
    args = tensor.args.model_copy(update={"observer_kwargs": {}})
    united = Observer.load_from_registry("static_minmax", base_name=tensor.base_name, args=args)
    lows, highs, likes = zip(*ranges, strict=True)
    united.absorb(
        min_vals=reduce(torch.minimum, lows),
        max_vals=reduce(torch.maximum, highs),
        observed_like=likes[0],
    )
    return united
