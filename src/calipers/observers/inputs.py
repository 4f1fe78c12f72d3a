"""How an observer of a weight comes to know the inputs of its module."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.utils.hooks import RemovableHandle

from calipers.numerics.tensors import first_tensor
from calipers.solvers.importance import Importance
from calipers.statistics.base import Lock, Statistic, guarded


class WeightObserver(Protocol):
    """An observer that may hold a statistic of the inputs of its module."""

    args: QuantizationArgs
    inputs: Statistic | None

    @property
    def lock(self) -> Lock:
        """The lock to hold while statistics are read or written."""

    def label(self) -> str:
        """Return how messages call it."""


class InputGathering:
    """Fills the ``inputs`` of an observer by a hook, and leaves them on the module for the next."""

    def __init__(self, observer: WeightObserver) -> None:
        self.observer = observer
        self.importance = Importance()  # how errors of the weight count
        self.has_warned = False  # whether somebody was told that importance cannot be used
        self._handle: RemovableHandle | None = None

    @property
    def lock(self) -> Lock:
        """The lock of the observer."""
        return self.observer.lock

    def use(self, importance: Importance) -> None:
        """Let errors count in another way; what is known of the inputs stays where it serves."""
        self.importance = importance
        before, inputs = self.observer.inputs, importance.statistic(None, self.observer.args)
        if inputs is before:  # there are none
            return
        self.observer.inputs = inputs
        if before is not None and inputs is not None and before.declared() == inputs.declared():
            inputs.owner = before.owner
            inputs.copy_from(before)

    @guarded
    def attach(self, module: torch.nn.Module) -> None:
        """Take over the sums that were left on a module, or start summing its inputs."""
        observer, channels = self.observer, getattr(module, "in_features", None)
        if observer.inputs is None or self.take_over(module) or channels is None:
            return
        sums = self.importance.statistic(channels, observer.args)
        if sums is not None and not observer.inputs.fields():
            observer.inputs = sums
            sums.update(torch.zeros(0, channels))  # sums of zero
        observer.inputs.owner = observer.label()
        if self._handle is not None:
            self._handle.remove()
        self._handle = module.register_forward_pre_hook(self.see, with_kwargs=True)
        self._publish(module)

    @guarded
    def detach(self, module: torch.nn.Module) -> None:
        """Stop summing, and leave the sums on the module."""
        handle = self._handle
        hook = None if handle is None else module._forward_pre_hooks.get(handle.id)
        # A copy of an observer has a handle too, but the hook is that of the original.
        if handle is not None and getattr(hook, "__self__", None) is self:
            handle.remove()
            self._handle = None
            self._publish(module)

    @guarded
    def take_over(self, module: torch.nn.Module) -> bool:
        """Take the sums that another observer left on a module, if it did."""
        fields = self.importance.fields
        if not fields or not all(hasattr(module, name) for name in fields):
            return False
        for hook in module._forward_pre_hooks.values():
            other = getattr(hook, "__self__", None)
            if isinstance(other, InputGathering) and {*fields} <= {*other.importance.fields}:
                return False  # somebody who gathers the same is at work
        for name in fields:
            setattr(self.observer, name, getattr(module, name))
            delattr(module, name)
        return True

    def see(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in the input of a call: the first tensor of it."""
        x, inputs = first_tensor((args, kwargs)), self.observer.inputs
        if x is not None and x.numel() and inputs is not None:
            with torch.no_grad():
                inputs.update(x)
            self._publish(module)

    @guarded
    def _publish(self, module: torch.nn.Module) -> None:
        """Let the module have the sums, as they are now."""
        inputs = self.observer.inputs
        known = {} if inputs is None else inputs.fields()
        for name in self.importance.fields:
            if name in known:
                setattr(module, name, known[name])
            elif hasattr(module, name):  # forgotten meanwhile
                delattr(module, name)
