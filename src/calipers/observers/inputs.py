"""How an observer of a weight comes to know the inputs of its module."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from calipers.numerics.tensors import first_tensor
from calipers.solvers.importance import Importance
from calipers.statistics.base import Lock, Statistic


class GathersInputs(Protocol):
    """What a hook shows inputs to: statistics of them, and how errors count under them."""

    inputs: Statistic | None
    weighing: Importance

    @property
    def lock(self) -> Lock:
        """The lock to hold while statistics are read or written."""


class InputHook:
    """Shows the inputs of a module to an observer, and publishes what it knows on the module."""

    def __init__(self, observer: GathersInputs, module: Any) -> None:
        self.observer = observer
        self.handle: RemovableHandle = module.register_forward_pre_hook(self.see, with_kwargs=True)
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
        hook = module._forward_pre_hooks.get(self.handle.id)
        return getattr(hook, "__self__", None) is self
