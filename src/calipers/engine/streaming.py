"""Models that go from disk to disk, some modules at a time: read, solved, and stored or judged."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from calipers.calibration.pipelines import NewValues, Part, Parts
from calipers.checkpoint.compression import compressed_state, name_on_disk, tensor_names
from calipers.checkpoint.state import join, module_state, own_modules, tied_names
from calipers.checkpoint.stored_weights import WeightSource
from calipers.checkpoint.writer import in_background
from calipers.engine.loop import StepDriver, apply_changes, run_parts
from calipers.errors import ConfigurationError, shortened
from calipers.judging.costs import ModuleCosts
from calipers.kernels.resources import FreedMemory, kernels_only
from calipers.planning.plan import Changes
from calipers.planning.specs import ModuleSpec
from calipers.runtime.progress import Progress
from calipers.topology.model import Topology
from calipers.topology.names import fused_groups, grouped

# Bytes for each element of a Hessian, (columns, columns), as solvers/gptq.py works.
_SUM = 8  # float64
_WORK = 44  # at the factorisation: five of float64 and a result of float32
_KEPT = 12  # a root and a Hessian that the next inputs may share


@dataclass
class PreparedModel:
    """A model whose modules have their schemes, and whose tensors may have no values.

    :param weights: where the values come from
    :param device: where modules are solved
    """

    model: PreTrainedModel
    driver: StepDriver
    weights: WeightSource
    fingerprint: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def modules(self) -> dict[str, ModuleSpec]:
        """The modules that are quantized, by their names."""
        return {module.name: module for module in self.driver.solution.plan.modules}

    @cached_property
    def ties(self) -> Mapping[str, str]:
        """Each tied copy, with the tensor it is tied to."""
        return tied_names(self.model)

    @cached_property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """Each module of the plan, with those that are solved and stored together with it.

        These are the ones that share its input. A step that changes others, such as norms, may have
        to see them beside the modules they feed: it gets whole decoder layers.
        """
        plan = self.driver.solution.plan
        groups = [[module.name for module in group] for group in grouped_by_input(plan.modules)]
        if plan.changed:
            topology = Topology.of(self.model)
            groups = [list(g) for g in grouped(plan.names, lambda n: topology.layer_of(n) or n)]
        parts: dict[str, tuple[str, ...]] = {name: (name,) for name in plan.names}
        for group in groups:
            parts |= dict.fromkeys(group, tuple(group))
        for pair in self.ties.items():  # what is changed under one name is stored under the other
            owners = [name.rpartition(".")[0] for name in pair]
            if not set(plan.changed).isdisjoint(owners):
                part = dict.fromkeys(other for name in owners for other in parts.get(name, (name,)))
                parts |= dict.fromkeys(part, tuple(part))
        return parts

    def read_parts(self, first: int = 0) -> Parts:
        """Read the tensors of each part, the next one while one is at work.

        :param first: the first module, in the order of the model, whose part is read
        """
        planned, seen = set(self.driver.solution.plan.names), set[str]()

        def read() -> Generator[Part, None, None]:
            for number, (name, _) in enumerate(own_modules(self.model)):
                wanted = [each for each in self.parts.get(name, ()) if each not in seen]
                if number >= first and wanted:
                    seen.update(wanted)
                    names = tuple(filter(planned.__contains__, wanted))
                    yield Part(names, {each: self.read(each) for each in wanted})

        yield from in_background(read())

    def read(self, name: str) -> dict[str, Tensor]:
        """Read the tensors that a module has on disk; the parameters of a scheme are not there."""
        state = module_state(self.model.get_submodule(name))
        places = {local: join(name, local) for local in state}
        if name in self.parts:  # what is stored for a tied copy has the name of the other one
            places = {local: self.ties.get(place, place) for local, place in places.items()}
        return {local: self.weights.read(n) for local, n in places.items() if self.weights.has(n)}

    @contextmanager
    def solved(self, part: Part) -> Iterator[Changes]:
        """Give modules their values, and solve them.

        Threads are left to kernels, unless large matrices are multiplied, which torch does.
        """
        tensors = (tensor for module in self.modules.values() for tensor in module.tensors)
        has_matrices = any(tensor.importance.uses_products for tensor in tensors)
        with torch.no_grad(), nullcontext() if has_matrices else kernels_only():
            for name, state in part.states.items():
                module = self.model.get_submodule(name)
                for local, old in module_state(module).items():
                    if local in state or old.is_meta:
                        empty = torch.zeros_like
                        new = state[local] if local in state else empty(old, device=self.device)
                        _replace(module, local, new.to(self.device, old.dtype))
            yield self.driver.solve(part.names)[1]

    def empty(self, name: str) -> None:
        """Take the values of a module away; their shapes stay."""
        module = self.model.get_submodule(name)
        for local, old in module_state(module).items():
            _replace(module, local, old.detach().to("meta"))

    def bytes_of_work(self, part: Part) -> int:
        """Return the memory that solving a part took for the time being, about."""
        return hessian_bytes([self.modules[name] for name in part.states if name in self.modules])


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    old = module._parameters.get(name)
    if old is None:
        module._buffers[name] = tensor
    else:
        module._parameters[name] = nn.Parameter(tensor, old.requires_grad)


class ErrorSink:
    """Keeps errors and costs alone, which are in the solution of the model's driver.

    :param seconds: module → how long it took to solve
    """

    def __init__(self, prepared: PreparedModel) -> None:
        self.seconds: dict[str, float] = {}
        self._prepared, self._freed = prepared, FreedMemory()

    def take(self, part: Part) -> NewValues:
        """Solve a part."""
        start = time.perf_counter()
        with self._prepared.solved(part):
            for name in part.states:
                self._prepared.empty(name)
        seconds = time.perf_counter() - start
        self.seconds |= dict.fromkeys(part.states, seconds / len(part.states))
        self._freed.count(self._prepared.bytes_of_work(part))
        return {}


_StoredTensor = tuple[int, str, str, Tensor]
"""The place of a module in the model, its name, the name of a tensor on disk, and the tensor."""


class CheckpointSink:
    """Makes the tensors of a checkpoint; reading, solving and writing go on at the same time."""

    def __init__(self, prepared: PreparedModel, progress: Progress) -> None:
        self.names = tensor_names(prepared.model)
        self._prepared, self._progress = prepared, progress
        self._order = list(own_modules(prepared.model))
        self._next = 0  # the module whose tensors come next
        self._compressed: dict[str, dict[str, Tensor]] = {}
        self._numbers: dict[str, int] = {}
        self._freed = FreedMemory()

    def tensors(self, state: Mapping[str, Any]) -> Generator[tuple[str, Tensor], None, None]:
        """Give the tensors with their names on disk.

        :param state: what ``state`` has returned in a run that was killed
        """
        self._next = self._restore(state)
        left = set(self._prepared.modules)
        with (
            self._progress.counting("quantizing", len(left), "modules") as add,
            closing(in_background(self._stored())) as stored,
        ):
            for number, module, name, tensor in stored:
                self._numbers[name] = number
                if module in left:
                    left.remove(module)
                    add(1)
                yield name, tensor
        yield from self._prepared.weights.converted()

    def state(self, name: str) -> dict[str, Any]:
        """Return what must be known to go on behind a tensor."""
        solution = self._prepared.driver.solution
        return {
            "module": self._numbers.get(name, len(self._order)),
            "errors": solution.errors.copy(),
            "costs": {name: asdict(each) for name, each in solution.costs.copy().items()},
            "notes": solution.notes.copy(),
        }

    def _restore(self, state: Mapping[str, Any]) -> int:
        """Take up what an earlier run knew, and return the first module that it had not done."""
        if not state:
            return 0
        solution = self._prepared.driver.solution
        solution.errors |= state["errors"]
        costs = state["costs"].items()
        solution.costs |= {name: ModuleCosts.from_dict(each) for name, each in costs}
        solution.notes |= state["notes"]
        return int(state["module"])

    def take(self, part: Part) -> NewValues:
        """Solve a part, and keep what is stored of each of its modules."""
        prepared, converted = self._prepared, self.names.converted
        with prepared.solved(part) as changes:
            lost = [join(*place) for place in changes.tensors if join(*place) in converted]
            if lost:
                raise ConfigurationError(
                    "The recipe changes tensors that checkpoints of this model hold in another "
                    f"form: {shortened(lost, 3)}",
                    hint="Load the model with transformers, and pass it to calipers.oneshot",
                )
            quantized = [prepared.modules[n] for n in part.states if n in prepared.modules]
            codes = apply_changes(prepared.model, quantized, changes, prepared.ties)
            for name in part.states:
                module = prepared.model.get_submodule(name)
                self._compressed[name] = compressed_state(module, codes.get(name))
                prepared.empty(name)
        self._freed.count(prepared.bytes_of_work(part))
        return {}

    def _stored(self) -> Generator[_StoredTensor, None, None]:
        """Solve the model part by part, and give what is stored in the order of its modules."""
        for _ in run_parts(self._prepared.read_parts(self._next), self):
            yield from self._ready()
        yield from self._ready()

    def _ready(self) -> Iterator[_StoredTensor]:
        """Give the tensors of the next modules, as far as they are solved."""
        while self._next < len(self._order):
            name, module = self._order[self._next]
            if name not in self._prepared.parts:
                state = self._prepared.read(name)
            elif name in self._compressed:
                state = self._compressed.pop(name)
            else:
                return
            for local, tensor in state.items():
                stored = name_on_disk(self.names, name, module, local)
                if stored is not None:
                    yield self._next, name, stored, tensor
            self._freed.count(sum(tensor.nbytes for tensor in state.values()))
            self._next += 1


def grouped_by_input(modules: Iterable[ModuleSpec]) -> list[list[ModuleSpec]]:
    """Put Linear modules together that have the same input, by their names."""
    linears = {module.name: module for module in modules if module.kind == "linear"}
    return [[linears[name] for name in group] for group in fused_groups(linears)]


def hessian_bytes(modules: Sequence[ModuleSpec]) -> int:
    """Return what Hessians take that are gathered together, and solved one after another."""
    sizes: list[int] = []
    works: list[int] = []
    for readers in grouped_by_input(filter(hessians_of, modules)):
        elements = (readers[0].columns or 0) ** 2
        sizes.append(max(map(hessians_of, readers)) * elements * _SUM)
        works.append(elements * (_WORK + _KEPT * bool(works)))
    return sum(sizes) + max(works, default=0)


def hessians_of(module: ModuleSpec) -> int:
    """Return how many sums of products of its inputs the error feedback of a module takes, at most.

    One of them is as long as its outputs are many, where they are added to a residual stream.
    """
    weight = module.tensor("weight")
    gathered = None if weight is None else weight.gathered
    return 0 if gathered is None or module.columns is None else len(gathered.fields) - 1
