"""What goes through the modules of a layer, and where it adds outputs to what it carries along."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calipers.numerics.tensors import first_tensor, tensor_version


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
    found: list[TracedTensor] = []

    def note(module: str, value: object, is_output: bool) -> None:
        tensor = first_tensor(value)
        if tensor is not None:
            version = tensor_version(tensor)
            found.append(TracedTensor(module, tensor, is_output, value, version))

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
        yield found
    finally:
        for handle in handles:
            handle.remove()


def calls_of(trace: Sequence[TracedTensor], names: Collection[str]) -> list[tuple[str, int]]:
    """Return the calls of some modules in order, each with the id of its input."""
    return [
        (each.module, id(each.tensor))
        for each in trace
        if each.module in names and not each.is_output
    ]


def residuals_of(trace: Sequence[TracedTensor], names: Collection[str]) -> dict[str, str]:
    """Return of which module the input is added to the output of another: residual connections.

    A sum is known by its value, whoever reads it next. Where a layer scales or normalizes the
    output first, nothing is found.

    :param trace: of the first call of a layer, which is the first of them and the last

    >>> x, y = torch.ones(2), torch.full((2,), 3.0)
    >>> inputs = [TracedTensor(name, x, is_output=False) for name in ("0", "0.norm", "0.up")]
    >>> outputs = [TracedTensor("0.down", y, True), TracedTensor("0", x + y, True)]
    >>> trace = [*inputs, *outputs]
    >>> residuals_of(trace, ["0.up", "0.down"])
    {'0.down': '0'}
    """
    found: dict[str, str] = {}
    for at, (name, output, is_output, *_) in enumerate(trace):
        if not is_output or name not in names or name in found:
            continue
        later = [each for each in trace[at + 1 : -1] if not each.is_output] + [trace[-1]]
        for before in _inputs_like(output, trace[:at]):
            total = before.tensor + output
            if any(_are_equal(total, after.tensor) for after in later):
                found[name] = before.module
                break
    return found


def _inputs_like(output: Tensor, trace: Sequence[TracedTensor]) -> list[TracedTensor]:
    """Return inputs of one shape, each tensor by its first reader."""
    alike = {
        id(each.tensor): each
        for each in reversed(trace)
        if not each.is_output and each.tensor.shape == output.shape
    }
    return list(alike.values())


def _are_equal(this: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same tokens, in whatever shape."""
    alike = this.shape[-1:] == other.shape[-1:] and this.numel() == other.numel()
    return alike and torch.equal(this, other.reshape(this.shape))
