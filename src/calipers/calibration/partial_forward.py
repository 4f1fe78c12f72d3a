"""Partial forward passes of a layer: up to some modules, and from cached activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple, TypeAlias

import torch
from compressed_tensors.modeling import (
    register_key_hook,
    register_query_hook,
    register_value_hook,
)
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from calipers.numerics.qparams import ActivationQuantizer
from calipers.numerics.tensors import tensor_version
from calipers.topology.tracing import TracedTensor


@dataclass(frozen=True)
class NewValues:
    """What modules compute with from now on.

    :param tensors: (module, tensor) → its new value
    :param activations: (module, activation) → how it is quantized
    """

    tensors: Mapping[tuple[str, str], Tensor] = field(default_factory=dict)
    activations: Mapping[tuple[str, str], ActivationQuantizer] = field(default_factory=dict)

    def joined(self, other: NewValues) -> NewValues:
        """Return these values and others, which win."""
        return NewValues(
            {**self.tensors, **other.tensors}, {**self.activations, **other.activations}
        )


class QuantizedForward:
    """Lets a layer compute as it will when the model is frozen, as far as it is solved.

    :param dtype: the dtype that the layer computes in; None: that of its weights
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self._tensors: dict[tuple[torch.nn.Module, str], Tensor] = {}
        self._activations: list[tuple[torch.nn.Module, ActivationQuantizer]] = []

    def add(self, values: NewValues) -> None:
        """Take the values of more modules."""
        for (name, local), tensor in values.tensors.items():
            moved = tensor.to(self._device, self._dtype or tensor.dtype)
            self._tensors[self._model.get_submodule(name), local] = moved
        for (name, _), quantize in values.activations.items():
            self._activations.append((self._model.get_submodule(name), quantize))

    def replaced(self, tensors: Mapping[tuple[str, str], Tensor]) -> QuantizedForward:
        """Return the same with other tensors; gradients pass through to them."""
        changed = QuantizedForward(self._model, self._device, self._dtype)
        changed._tensors.update(self._tensors)
        changed._activations.extend(self._activations)
        changed.add(NewValues(tensors))
        return changed

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the modules compute so; their own weights are untouched behind the new ones."""
        with ExitStack() as stack:
            for (module, local), tensor in self._tensors.items():
                vars(module)[local] = tensor  # found before the parameter of this name
                stack.callback(vars(module).pop, local, None)
            for module, quantize in self._activations:
                stack.callback(replace_activation(module, quantize).remove)
            yield


STATE_HOOKS = {"q": register_query_hook, "k": register_key_hook, "v": register_value_hook}


def replace_activation(module: torch.nn.Module, quantize: ActivationQuantizer) -> RemovableHandle:
    """Let a module compute with a quantized input, or hand a quantized output on."""
    if quantize.base_name == "input":
        return module.register_forward_pre_hook(
            lambda _, args: (quantize(args[0]), *args[1:]) if args else None
        )
    if quantize.base_name == "output":
        return module.register_forward_hook(lambda *call: quantize(call[-1]))
    register = STATE_HOOKS[quantize.base_name]
    handle: RemovableHandle = register(module, lambda _, states: quantize(states))
    return handle


@contextmanager
def stop_after_calls(
    modules: Iterable[torch.nn.Module], calls: int | None, *, with_outputs: bool = False
) -> Iterator[None]:
    """Leave the ``with`` as soon as modules have been called so many times in all; None: never.

    :param with_outputs: whether their outputs are measured, too; if not, they compute nothing, and
        zeros stand for their outputs
    """
    if calls is None:
        yield
        return
    left = calls

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise StopForward

    def zeros(module: torch.nn.Module, x: Tensor) -> Tensor:
        rows = module.get_parameter("weight").shape[0]
        return x.new_zeros(*x.shape[:-1], rows)

    with ExitStack() as stack:
        for module in modules:
            if with_outputs:
                handle = module.register_forward_hook(count)
            else:
                # Behind all other hooks, which are to see the last input.
                handle = module.register_forward_pre_hook(count)
                replace_forward(stack, module, partial(zeros, module))
            stack.callback(handle.remove)
        with suppress(StopForward):
            yield


def replace_forward(stack: ExitStack, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module compute something else until the stack is closed."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    if own is None:
        stack.callback(vars(module).pop, "forward")
    else:
        stack.callback(vars(module).__setitem__, "forward", own)


class StopForward(BaseException):
    """What is to be measured has been: the rest need not run, whatever errors it catches."""


Modules = Collection[torch.nn.Module]
_Place: TypeAlias = tuple[int, torch.nn.Module]
"""The number of a batch, and a module."""


@dataclass
class Budget:
    """Bytes of memory that caches may still take."""

    left: int


class ResumePoints(NamedTuple):
    """Where a later run of a layer can go on.

    :param modules: submodules whose output can be kept
    :param tails: submodule → the module inside it whose output it returns; with the input of that
        module kept, nothing else inside has to run again
    """

    modules: list[torch.nn.Module]
    tails: Mapping[torch.nn.Module, Tail]

    @classmethod
    def of(
        cls,
        trace: Sequence[TracedTensor],
        modules: Mapping[str, torch.nn.Module],
        watched: Collection[str],
    ) -> ResumePoints:
        """Find them in the trace of a layer.

        :param trace: of one call of the layer
        :param modules: the submodules of the layer by name, parents first
        :param watched: modules whose inputs must be seen in every run: no module around one of
            them is skipped
        """
        calls = Counter(each.module for each in trace if each.is_output)
        outputs = {each.module: each for each in trace if each.is_output}
        usable = [
            name
            for name in modules
            if calls[name] == 1 and not any(each.startswith(name + ".") for each in watched)
        ]
        tails: dict[str, str] = {}
        for name in usable:
            inside = (o for o in usable if o.startswith(name + ".") and o not in tails.values())
            last = [o for o in inside if _returns(outputs[name], outputs[o])]
            if last:
                tails[name] = last[-1]  # parents come first: the innermost
        kept = [name for name in usable if not any(name.startswith(o + ".") for o in tails)]
        return cls(
            [modules[name] for name in kept],
            {
                modules[name]: Tail(modules[tail], outputs[name].value)
                for name, tail in tails.items()
            },
        )


class Tail(NamedTuple):
    """The module inside another one that computes the output of both.

    :param returned: an output of the outer one: a tensor, or a tuple of a tensor and Nones
    """

    module: torch.nn.Module
    returned: Tensor | tuple[Tensor | None, ...]

    def output(self, x: Any) -> Any:
        """Return what the outer module returns, given the input of the inner one."""
        value = self.module(x)
        return value if isinstance(self.returned, Tensor) else (value, *self.returned[1:])


def _returns(outer: TracedTensor, inner: TracedTensor) -> bool:
    """Whether a module returns the very output of another one, and nothing else."""
    is_same = outer.tensor is inner.tensor and outer.version == inner.version
    if isinstance(outer.value, tuple):
        first, *others = outer.value
        return is_same and first is outer.tensor and all(each is None for each in others)
    return is_same and outer.value is outer.tensor


class _Kept(NamedTuple):
    """A value, and the versions that its tensors had when it was computed."""

    value: Any
    versions: tuple[int, ...]

    @property
    def is_unchanged(self) -> bool:
        return self.versions == tuple(map(tensor_version, _tensors(self.value)))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in _tensors(self.value))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class ActivationCache:
    """Activations of one layer in one stream, by batch.

    Solving a layer in stages runs every batch through it once per stage, and a run differs from
    the one before only behind the modules that were solved in between. Submodules whose output is
    final are therefore run once: their output is kept and returned in later runs. Whatever does not
    fit into the budget, or was changed in place, is computed again, with the same result.
    """

    def __init__(self, points: ResumePoints, budget: Budget) -> None:
        self._points, self._budget = points, budget
        self._outputs: dict[_Place, _Kept] = {}
        self._inputs: dict[_Place, _Kept] = {}  # of tails
        self._is_final = False  # whether what the run at work computes is final so far

    @contextmanager
    def run(self, index: int, unsolved: Modules, *, is_changing: bool) -> Iterator[None]:
        """Let a batch run through the layer.

        :param unsolved: modules that are still to be measured or solved
        :param is_changing: whether solving them changes what they compute in this stream: then
            nothing behind them is final
        """
        pending = set(unsolved)
        self._is_final = bool(pending)  # with nothing left to solve, no run follows

        def end_final(*_: object) -> None:
            self._is_final = False

        def keep_input(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            if self._is_final and len(args) == 1:
                self._keep(self._inputs, (index, module), args[0])

        with ExitStack() as stack:
            for module in self._points.modules:
                if pending.isdisjoint(module.modules()):
                    replace_forward(stack, module, self._resuming(index, module))
            for tail in self._points.tails.values():
                stack.callback(tail.module.register_forward_pre_hook(keep_input).remove)
            # Registered last: the input of an unsolved module is final, its output is not.
            for module in pending if is_changing else ():
                stack.callback(module.register_forward_pre_hook(end_final).remove)
            yield

    def clear(self) -> None:
        """Forget everything."""
        for kept in (*self._outputs.values(), *self._inputs.values()):
            self._budget.left += kept.nbytes
        self._outputs.clear()
        self._inputs.clear()

    def _resuming(self, index: int, module: torch.nn.Module) -> Callable[..., Any]:
        """Return a forward that goes on from what an earlier run of the batch has kept."""
        compute, place = module.forward, (index, module)
        tail = self._points.tails.get(module)
        calls = 0

        @wraps(compute)  # hooks of compressed-tensors read the signature
        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > 1:  # unlike the traced batch; what is kept is of the first call
                return compute(*args, **kwargs)
            kept = self._outputs.get(place)
            if kept is not None and kept.is_unchanged:
                return kept.value
            start = None if tail is None else self._inputs.get((index, tail.module))
            if tail is not None and start is not None and start.is_unchanged:
                value = tail.output(start.value)
            else:
                value = compute(*args, **kwargs)
            if self._is_final:
                self._keep(self._outputs, place, value)
                if tail is not None:
                    self._drop(self._inputs, (index, tail.module))
            return value

        return forward

    def _keep(self, where: dict[_Place, _Kept], place: _Place, value: Any) -> None:
        self._drop(where, place)
        tensors = _tensors(value)
        if any(tensor.is_inference() for tensor in tensors):
            return  # a later change in place would go unnoticed
        kept = _Kept(value, tuple(map(tensor_version, tensors)))
        if kept.nbytes <= self._budget.left:
            where[place] = kept
            self._budget.left -= kept.nbytes

    def _drop(self, where: dict[_Place, _Kept], place: _Place) -> None:
        kept = where.pop(place, None)
        if kept is not None:
            self._budget.left += kept.nbytes
