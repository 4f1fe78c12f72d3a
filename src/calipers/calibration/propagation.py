"""What layers are calibrated on when those before them are quantized already."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor


class NewTensors:
    """What tensors of a layer have become, to compute with before the model is frozen.

    :param dtype: the dtype that the layer computes in; None: that of its weights
    """

    def __init__(
        self, model: torch.nn.Module, device: torch.device, dtype: torch.dtype | None
    ) -> None:
        self._model, self._device, self._dtype = model, device, dtype
        self._tensors: dict[tuple[torch.nn.Module, str], Tensor] = {}

    def add(self, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """Take the tensors of more modules."""
        for (name, local), tensor in tensors.items():
            moved = tensor.to(self._device, self._dtype or tensor.dtype)
            self._tensors[self._model.get_submodule(name), local] = moved

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the modules compute with them; their own weights are untouched behind them."""
        try:
            for (module, local), tensor in self._tensors.items():
                vars(module)[local] = tensor  # found before the parameter of this name
            yield
        finally:
            for module, local in self._tensors:
                vars(module).pop(local, None)


class Stage(NamedTuple):
    """Modules of a layer that work side by side.

    :param calls: how often they are called for a batch, in all; None where that differs
    :param residuals: module → the one whose input is added to its output
    """

    names: list[str]
    calls: int | None
    residuals: dict[str, str] = {}  # noqa: RUF012  a tuple never changes


def stages_of(calls: Sequence[tuple[str, int]], names: Sequence[str]) -> list[Stage]:
    """Put modules in the order of their work; those with the same input stand together.

    So do the same projections of all experts, which do not see each other's results. Modules that
    were not called come with the last.

    :param calls: module and input of each call, in order

    >>> calls = [("0.q_proj", 1), ("0.k_proj", 1), ("0.experts.0.up_proj", 2),
    ...          ("0.experts.0.down_proj", 3), ("0.experts.1.up_proj", 4)]
    >>> names = [*dict(calls), "0.experts.1.down_proj", "0.self_attn"]
    >>> for stage in stages_of(calls, names):
    ...     print(*stage.names, stage.calls)
    0.q_proj 0.k_proj 2
    0.experts.0.up_proj 0.experts.1.up_proj None
    0.experts.0.down_proj 0.experts.1.down_proj 0.self_attn None
    """
    by_input: dict[int, int] = {}
    by_kind: dict[str, int] = {}
    for name, tensor in calls:
        stage = by_input.get(tensor, by_kind.get(without_expert_number(name)))
        stage = len(set(by_kind.values())) if stage is None else stage
        by_input[tensor] = stage
        by_kind.setdefault(without_expert_number(name), stage)
    last = max(by_kind.values(), default=0)
    stages: list[list[str]] = [[] for _ in range(last + 1)]
    for name in names:
        stages[by_kind.get(without_expert_number(name), last)].append(name)
    counts = Counter(name for name, _ in calls)
    return [Stage(found, _number_of_calls(found, counts)) for found in stages if found]


def _number_of_calls(names: Sequence[str], counts: Mapping[str, int]) -> int | None:
    fixed = all(counts[name] and without_expert_number(name) == name for name in names)
    return sum(counts[name] for name in names) if fixed else None


def without_expert_number(name: str) -> str:
    """Return what the same projections of all experts have in common.

    >>> without_expert_number("layers.0.mlp.experts.7.down_proj")
    'layers.0.mlp.experts.*.down_proj'
    """
    return re.sub(r"(?<=\.experts\.)\d+", "*", name)


@contextmanager
def until_called(
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
            raise _Enough

    with ExitStack() as stack:
        for module in modules:
            if with_outputs:
                handle = module.register_forward_hook(count)
            else:
                # Behind all other hooks, which are to see the last input.
                handle = module.register_forward_pre_hook(count)
                replace_forward(stack, module, partial(_zeros, module))
            stack.callback(handle.remove)
        with suppress(_Enough):
            yield


def _zeros(module: torch.nn.Module, x: Tensor) -> Tensor:
    """Return zeros of the shape of an output."""
    rows = module.get_parameter("weight").shape[0]
    return x.new_zeros(*x.shape[:-1], rows)


def replace_forward(stack: ExitStack, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
    """Let a module compute something else until the stack is closed."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    if own is None:
        stack.callback(vars(module).pop, "forward")
    else:
        stack.callback(vars(module).__setitem__, "forward", own)


class _Enough(BaseException):
    """What is to be measured has been: the rest need not run, whatever errors it catches."""
