"""What layers are calibrated on when those before them are quantized already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

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
            raise _StopForward

    with ExitStack() as stack:
        for module in modules:
            if with_outputs:
                handle = module.register_forward_hook(count)
            else:
                # Behind all other hooks, which are to see the last input.
                handle = module.register_forward_pre_hook(count)
                replace_forward(stack, module, partial(_zeros, module))
            stack.callback(handle.remove)
        with suppress(_StopForward):
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


class _StopForward(BaseException):
    """What is to be measured has been: the rest need not run, whatever errors it catches."""
