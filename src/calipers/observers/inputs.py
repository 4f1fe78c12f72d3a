"""What an observer of a weight knows of the inputs of its module, and how it comes to know it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.utils.hooks import RemovableHandle

from calipers.numerics.tensors import first_tensor
from calipers.solvers.importance import Importance
from calipers.statistics.base import Statistic
from calipers.statistics.locking import guarded
from calipers.statistics.module import StatisticModule


class InputGathering(StatisticModule):
    """An observer that may gather what is known of the inputs of the module of a weight."""

    args: QuantizationArgs
    inputs: Statistic | None = None
    """What is known of them, if errors are weighed by it."""
    weighing: Importance
    """How errors count."""

    _hook: InputHook | None = None

    def weigh_by(self, weighing: Importance) -> None:
        """Take note of how errors count; what is known stays, if it is still what is asked for."""
        self.weighing = weighing
        before, inputs = self.inputs, weighing.statistic(None, self.args)
        if inputs is before:  # there are none
            return
        self.inputs = inputs
        if before is not None and inputs is not None and before.declared() == inputs.declared():
            inputs.owner = before.owner
            inputs.copy_from(before)

    @guarded
    def attach(self, module: torch.nn.Module) -> None:
        """Take over the sums of inputs that were left on a module, or start summing them.

        Nothing happens where the observer has no use for them, or there are no ``in_features``.
        """
        if self.inputs is None or self.take_over(module) or not hasattr(module, "in_features"):
            return
        self.begin_inputs(module.in_features)
        self.inputs.owner = self.label()
        self._remove_hook()
        self._hook = InputHook(self, module)

    @guarded
    def detach(self, module: torch.nn.Module) -> None:
        """Stop summing, and leave the sums on ``module``."""
        hook = self._hook
        if hook is not None and hook.is_on(module):
            self._remove_hook()
            hook.publish(module)

    @guarded
    def take_over(self, module: torch.nn.Module) -> bool:
        """Take the sums that another observer left on ``module``, if it did."""
        left = published(module, self.weighing.fields)
        if left is None:
            return False
        for name, value in left.items():
            setattr(self, name, value)
            delattr(module, name)
        return True

    @guarded
    def begin_inputs(self, columns: Any) -> None:
        """Begin to sum up inputs of so many channels, unless there are sums already."""
        if self.inputs is None or self.inputs.fields():
            return
        inputs = self.weighing.statistic(columns, self.args)
        if inputs is not None:
            self.inputs = inputs
            inputs.owner = self.label()
            inputs.update(torch.zeros(0, columns))  # sums of zero

    def _remove_hook(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


class InputHook:
    """Shows the inputs of a module to an observer, and publishes what it knows on the module."""

    def __init__(self, observer: InputGathering, module: Any) -> None:
        self.observer = observer
        self._handle: RemovableHandle = module.register_forward_pre_hook(self.see, with_kwargs=True)
        self.publish(module)

    def see(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in the input of a call: the first tensor of it."""
        x, inputs = first_tensor((args, kwargs)), self.observer.inputs
        if x is not None and x.numel() and inputs is not None:
            with torch.no_grad():
                inputs.update(x)
            self.publish(module)

    def publish(self, module: torch.nn.Module) -> None:
        """Let the module have the sums, as they are now."""
        with self.observer.lock:
            inputs = self.observer.inputs
            known = {} if inputs is None else inputs.fields()
            for name in self.observer.weighing.fields:
                if name in known:
                    setattr(module, name, known[name])
                elif hasattr(module, name):  # forgotten meanwhile
                    delattr(module, name)

    def is_on(self, module: torch.nn.Module) -> bool:
        """Whether the hook is this one, not the one of an observer that this one was copied of."""
        hook = module._forward_pre_hooks.get(self._handle.id)
        return getattr(hook, "__self__", None) is self

    def remove(self) -> None:
        """Look no longer."""
        self._handle.remove()


def published(module: torch.nn.Module, fields: Iterable[str]) -> dict[str, torch.Tensor] | None:
    """Return the sums that somebody left on a module; None if any of them is missing, or in use."""
    names = set(fields)
    if not names or not all(hasattr(module, name) for name in names):
        return None
    hooks = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    if any(isinstance(h, InputHook) and names <= {*h.observer.weighing.fields} for h in hooks):
        return None  # somebody who gathers the same is at work
    return {name: getattr(module, name) for name in fields}
