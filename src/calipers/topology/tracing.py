"""What a run of a layer shows: the order of its modules, shared inputs, residual connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from compressed_tensors.modeling import KV_CACHE_ATTR
from torch import Tensor

from calipers.numerics.tensors import first_tensor, tensor_version
from calipers.topology.names import without_expert_number


class TracedTensor(NamedTuple):
    """A tensor that went into a module, or came out of it.

    :param value: the whole of the arguments or the result, of which it is the first tensor
    :param version: how often the tensor had been changed in place by then
    """

    module: str
    tensor: Tensor
    is_output: bool
    value: Any = None
    version: int = 0


@contextmanager
def traced(prefix: str, layer: torch.nn.Module) -> Iterator[list[TracedTensor]]:
    """Note what goes into the modules of a layer and comes out of them, in order."""
    trace: list[TracedTensor] = []

    def note(module: str, value: object, is_output: bool) -> None:
        tensor = first_tensor(value)
        if tensor is not None:
            version = tensor_version(tensor)
            trace.append(TracedTensor(module, tensor, is_output, value, version))

    handles = []
    for name, module in layer.named_modules(prefix=prefix):
        handles += [
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: note(name, (args, kwargs), False),
                with_kwargs=True,
            ),
            module.register_forward_hook(
                lambda _, _args, output, name=name: note(name, output, True)
            ),
        ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def calls_of(trace: Sequence[TracedTensor], names: Collection[str]) -> list[tuple[str, int]]:
    """Return the calls of some modules in order, each with the id of its input.

    Attention whose states are quantized counts as called where they are: behind its projections.
    """
    states = {f"{name}.{KV_CACHE_ATTR}": name for name in names}
    inputs = [passed for passed in trace if not passed.is_output]
    attention = {states.get(passed.module) for passed in inputs}
    return [
        (states.get(passed.module, passed.module), id(passed.tensor))
        for passed in inputs
        if passed.module in states or passed.module in attention.symmetric_difference(names)
    ]


def residuals_of(trace: Sequence[TracedTensor], names: Collection[str]) -> dict[str, str]:
    """Return of which module the input is added to the output of another: residual connections.

    A sum is known by its value, whoever reads it next. Where a layer scales or normalizes the
    output first, nothing is found.

    :param trace: of the first call of a layer, which is the first of them and the last
    """
    residuals: dict[str, str] = {}
    for at, (name, output, is_output, *_) in enumerate(trace):
        if not is_output or name not in names or name in residuals:
            continue
        later = [passed for passed in trace[at + 1 : -1] if not passed.is_output] + [trace[-1]]
        # Inputs of one shape, each tensor by its first reader.
        inputs = {
            id(passed.tensor): passed
            for passed in reversed(trace[:at])
            if not passed.is_output and passed.tensor.shape == output.shape
        }
        for before in inputs.values():
            total = before.tensor + output
            same_size = [  # the same tokens may have another shape
                after.tensor
                for after in later
                if after.tensor.shape[-1:] == total.shape[-1:]
                and after.tensor.numel() == total.numel()
            ]
            if any(torch.equal(total, tensor.reshape(total.shape)) for tensor in same_size):
                residuals[name] = before.module
                break
    return residuals


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
    result = []
    for members in filter(None, stages):
        fixed = all(counts[name] and without_expert_number(name) == name for name in members)
        result.append(Stage(members, sum(counts[name] for name in members) if fixed else None))
    return result
