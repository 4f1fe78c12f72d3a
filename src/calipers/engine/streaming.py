"""The tensors of a checkpoint, made one after the other of those in the files of a model."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calipers.checkpoint.compression import compressed_state, name_on_disk
from calipers.checkpoint.state import StoredNames, join, module_state, own_modules, tied_names
from calipers.checkpoint.stored_weights import WeightSource
from calipers.checkpoint.writer import in_background
from calipers.engine.applying import apply_changes
from calipers.engine.loop import StepDriver
from calipers.engine.needs import grouped_by_input, hessian_bytes
from calipers.errors import ConfigurationError, shortened
from calipers.judging.costs import ModuleCosts
from calipers.kernels.resources import Freed, kernels_only
from calipers.planning.plan import Changes, Plan
from calipers.runtime.progress import Progress
from calipers.topology.model import Topology
from calipers.topology.names import grouped

State = dict[str, Tensor]
"""The tensors of a module itself, by their local names."""


class _Read(NamedTuple):
    """A module whose tensors are stored next.

    :param number: its place in the model
    :param states: what was read, by module: its own or, for the first one of a part, those of all
        that are solved together
    """

    number: int
    name: str
    module: nn.Module
    states: dict[str, State]


class _Made(NamedTuple):
    """A tensor of the checkpoint.

    :param number: the place of its module in the model
    :param module: the name of that in the model
    :param name: its own on disk
    """

    number: int
    module: str
    name: str
    tensor: Tensor


class SolvedTensors:
    """What becomes of the tensors of a model; reading, solving and writing go on at the same time.

    :param model: the model, whose modules have their schemes; its tensors may have no values
    :param names: where each tensor of the model goes
    :param driver: solves modules, for which it is prepared
    :param device: where solvers work
    """

    def __init__(
        self,
        model: PreTrainedModel,
        names: StoredNames,
        weights: WeightSource,
        driver: StepDriver,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._model, self._names, self._weights = model, names, weights
        self._driver, self._device, self._progress = driver, device, progress
        self._modules = {module.name: module for module in driver.solution.plan.modules}
        self._ties, self._converted = tied_names(model), names.converted
        self._planned = set(driver.solution.plan.names)
        self._parts = _parts(model, driver.solution.plan, self._ties)
        self._solved: dict[str, State] = {}
        self._numbers: dict[str, int] = {}

    def tensors(self, state: Mapping[str, Any]) -> Generator[tuple[str, Tensor], None, None]:
        """Give the tensors with their names on disk.

        :param state: what ``state`` has returned in a run that was killed
        """
        left = set(self._modules)
        with (
            self._progress.counting("quantizing", len(left), "modules") as add,
            closing(in_background(self._read(self._restore(state)))) as read,
            closing(in_background(self._make(read))) as made,
        ):
            for number, module, name, tensor in made:
                self._numbers[name] = number
                if module in left:
                    left.remove(module)
                    add(1)
                yield name, tensor
        yield from self._weights.converted()

    def solved_beside(
        self, others: Sequence[SolvedTensors]
    ) -> Generator[tuple[tuple[str, ...], list[float]], None, None]:
        """Solve all modules, here and by others, and keep errors and costs alone, in the drivers.

        Each weight is read once, and solved in all ways before the next. Gives the names of modules
        that were solved together, and the seconds that each way took.

        :param others: the same modules of the same model with other schemes
        """
        freed = Freed()
        with closing(in_background(self._read(0))) as read:
            for _, name, _, states in read:
                if name in self._parts and states:
                    seconds = [each._seconds_to_solve(states) for each in (self, *others)]
                    freed.count(self._bytes_of_work(states))
                    yield tuple(states), seconds

    def _seconds_to_solve(self, states: dict[str, State]) -> float:
        start = time.perf_counter()
        with self._solving():
            self._changes_of(states)
        for name in states:
            _empty(self._model.get_submodule(name))
        return time.perf_counter() - start

    def state(self, name: str) -> dict[str, Any]:
        """Return what must be known to go on behind a tensor."""
        solution = self._driver.solution
        return {
            "module": self._numbers.get(name, len(list(own_modules(self._model)))),
            "errors": solution.errors.copy(),
            "costs": {name: asdict(each) for name, each in solution.costs.copy().items()},
            "notes": dict(solution.changes.notes),
        }

    def _restore(self, state: Mapping[str, Any]) -> int:
        """Take up what an earlier run knew, and return the first module that it had not done."""
        if not state:
            return 0
        solution = self._driver.solution
        solution.errors |= state["errors"]
        costs = state["costs"].items()
        solution.costs |= {name: ModuleCosts.from_dict(each) for name, each in costs}
        solution.changes = solution.changes.joined(Changes(notes=state["notes"]))
        return int(state["module"])

    def _read(self, first: int) -> Generator[_Read, None, None]:
        """Read the tensors of each module; those that are solved together, with the first."""
        seen: set[str] = set()
        for number, (name, module) in enumerate(own_modules(self._model)):
            if number < first:
                continue
            wanted = [each for each in self._parts.get(name, (name,)) if each not in seen]
            seen.update(wanted)
            yield _Read(number, name, module, {each: self._state_of(each) for each in wanted})

    def _state_of(self, name: str) -> State:
        """Read the tensors that a module has on disk; the parameters of a scheme are not there."""
        state = module_state(self._model.get_submodule(name))
        places = {local: join(name, local) for local in state}
        if name in self._parts:  # what is stored for a tied copy has the name of the other one
            places = {local: self._ties.get(place, place) for local, place in places.items()}
        return {local: self._weights.read(n) for local, n in places.items() if self._weights.has(n)}

    def _make(self, read: Iterator[_Read]) -> Generator[_Made, None, None]:
        """Make of what was read what is stored."""
        freed = Freed()
        with self._solving():
            for number, name, module, states in read:
                if name in self._parts and states:
                    self._solve(states)
                    freed.count(self._bytes_of_work(states))
                state = self._solved.pop(name) if name in self._parts else states[name]
                for local, tensor in state.items():
                    stored = name_on_disk(self._names, name, module, local)
                    if stored is not None:
                        yield _Made(number, name, stored, tensor)
                freed.count(sum(tensor.nbytes for tensor in state.values()))

    @contextmanager
    def _solving(self) -> Iterator[None]:
        """Leave the threads to kernels, unless large matrices are multiplied, which torch does."""
        tensors = (tensor for module in self._modules.values() for tensor in module.tensors)
        has_matrices = any(tensor.importance.uses_products for tensor in tensors)
        with torch.no_grad(), nullcontext() if has_matrices else kernels_only():
            yield

    def _changes_of(self, states: dict[str, State]) -> Changes:
        """Give modules their values, and solve them together."""
        for name, state in states.items():
            _fill(self._model.get_submodule(name), state, self._device)
        names = tuple(filter(self._planned.__contains__, states))
        _, changes = self._driver.solve_prepared(names)
        return changes

    def _solve(self, states: dict[str, State]) -> None:
        """Solve modules together, and keep what is stored of each."""
        changes = self._changes_of(states)
        converted = [join(*place) for place in changes.tensors if join(*place) in self._converted]
        if converted:
            raise ConfigurationError(
                "The recipe changes tensors that checkpoints of this model hold in another form: "
                f"{shortened(converted, 3)}",
                hint="Load the model with transformers, and pass it to calipers.oneshot",
            )
        quantized = [self._modules[name] for name in states if name in self._modules]
        apply_changes(self._model, quantized, changes, self._ties)
        for name in states:
            module = self._model.get_submodule(name)
            self._solved[name] = compressed_state(module)
            _empty(module)

    def _bytes_of_work(self, names: Collection[str]) -> int:
        return hessian_bytes([self._modules[name] for name in names if name in self._modules])


def _parts(
    model: PreTrainedModel, plan: Plan, ties: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Return for each module of a plan those that are solved and stored together with it.

    These are the ones that share its input. A step that changes others, such as norms, may have to
    see them beside the modules they feed: it gets whole decoder layers.
    """
    groups = [[module.name for module in group] for group in grouped_by_input(plan.modules)]
    if plan.changed:
        topology = Topology.of(model)
        groups = [list(g) for g in grouped(plan.names, lambda n: topology.layer_of(n) or n)]
    parts: dict[str, tuple[str, ...]] = {name: (name,) for name in plan.names}
    for group in groups:
        parts |= dict.fromkeys(group, tuple(group))
    for pair in ties.items():  # what is changed under one name is stored under the other
        owners = [name.rpartition(".")[0] for name in pair]
        if not set(plan.changed).isdisjoint(owners):
            part = dict.fromkeys(other for name in owners for other in parts.get(name, (name,)))
            parts |= dict.fromkeys(part, tuple(part))
    return parts


def _fill(module: nn.Module, state: State, device: torch.device) -> None:
    """Give a module values: those that were read, and room for the others."""
    for name, old in module_state(module).items():
        if name in state or old.is_meta:
            new = state[name] if name in state else torch.zeros_like(old, device=device)
            _replace(module, name, new.to(device, old.dtype))


def _empty(module: nn.Module) -> None:
    """Take the values of a module away; their shapes stay."""
    for name, old in module_state(module).items():
        _replace(module, name, old.detach().to("meta"))


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    old = module._parameters.get(name)
    if old is None:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, old.requires_grad)
