"""Models that accelerate has offloaded (``device_map``, ``cpu_offload``, ``disk_offload``).

Hooks of accelerate leave modules with tensors that have no values, and load them for the time of a
forward pass. Calibration reads tensors at other times, too, as compressed-tensors lets it: so its
kind of offloading takes the place of the hooks while a model is at work.
"""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from compressed_tensors.offload.cache.cpu import CPUCache
from compressed_tensors.offload.utils import send_tensors, to_tensor
from torch import Tensor

from calipers.errors import ConfigurationError

_HOOK, _CALLED, _WRAPPED = "_hf_hook", "forward", "_old_forward"  # where accelerate keeps things
_KINDS = ("_parameters", "_buffers")


@contextmanager
def without_accelerate_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Let the tensors of a model that accelerate has offloaded be read whenever they are asked for.

    Afterwards accelerate offloads the model again, with all that it has got meanwhile. The files
    and tensors that accelerate has stored are only read.
    """
    hooked = [_HookedModule(module, hook) for module, hook in _hooks(model)]
    try:
        for each in hooked:
            each.replace_hook()
        yield
    finally:
        for each in hooked:
            each.restore_hook()


def _hooks(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, Any]]:
    """Find the modules with tensors of their own that have a hook, and what places these."""
    for name, module in model.named_modules():
        given = vars(module).get(_HOOK)
        for hook in getattr(given, "hooks", (given,)):  # several may be in one
            if getattr(hook, "execution_device", None) is None or not hasattr(hook, "weights_map"):
                continue
            if hook.offload and hook.place_submodules:
                raise ConfigurationError(
                    f"was offloaded as one, with all that is in it ('{name}')",
                    subject=type(module).__name__,
                    hint="Offload the model without preload_module_classes.",
                )
            if module._parameters or module._buffers:
                yield module, hook
                break


class _HookedModule:
    """A module with a hook of accelerate."""

    def __init__(self, module: torch.nn.Module, hook: Any) -> None:
        self._module, self._hook = module, hook
        self._before = dict(vars(module))

    def replace_hook(self) -> None:
        attributes, before = vars(self._module), self._before
        original = before[_WRAPPED].__func__
        for kind in _KINDS:
            attributes[kind] = _StoredTensors(self._hook, before[kind])
        del attributes[_HOOK], attributes[_WRAPPED]
        attributes["_original_forward_func"] = original  # what compressed-tensors wraps

        @wraps(original)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            device = module._parameters.onload_device
            args, kwargs = send_tensors((args, kwargs), device=device)
            return module._original_forward_func(module, *args, **kwargs)

        attributes[_CALLED] = MethodType(forward, self._module)

    def restore_hook(self) -> None:
        attributes, before = vars(self._module), self._before
        if not isinstance(attributes["_parameters"], _StoredTensors):
            return  # an error came before it was replaced
        new: dict[str, Tensor] = {}
        for kind in _KINDS:
            held = attributes[kind].offloaded_values
            if self._hook.offload and (kind == "_parameters" or self._hook.offload_buffers):
                added = {
                    n: t for n, t in held.items() if t is not None and t is not before[kind].get(n)
                }
                new |= added
                # Accelerate has tensors without values, which it loads when they are needed.
                held = held | {n: to_tensor(t.detach().to("meta"), t) for n, t in added.items()}
            attributes[kind] = before[kind]
            attributes[kind].clear()
            attributes[kind].update(held)
        forward = attributes.pop("_original_forward_func")
        changed = forward is not before[_WRAPPED].__func__
        attributes[_WRAPPED] = MethodType(forward, self._module) if changed else before[_WRAPPED]
        attributes[_CALLED] = before[_CALLED]
        attributes[_HOOK] = _with_tensors(before[_HOOK], self._hook, new) if new else before[_HOOK]


class _StoredTensors(CPUCache):  # type: ignore[misc]
    """Tensors of a module, loaded from where accelerate has them.

    Those that the module gets instead, or besides, are in memory: nothing that accelerate has
    stored is overwritten.
    """

    def __init__(self, hook: Any, tensors: Mapping[str, Tensor | None]) -> None:
        super().__init__(torch.device(hook.execution_device))
        if not hook.offload:
            self.offload_device = self.onload_device
        self.offloaded_values = dict(tensors)
        self._stored = hook.weights_map
        self._names = {
            tensor: name
            for name, tensor in tensors.items()
            if tensor is not None and tensor.is_meta
        }

    def onload(self, offloaded: Tensor | None) -> Tensor | None:
        """Return a tensor on the device that the module computes on."""
        if offloaded is None or offloaded not in self._names:
            found: Tensor | None = super().onload(offloaded)
            return found
        value = self._stored[self._names[offloaded]].detach()
        loaded: Tensor = to_tensor(value.to(self.onload_device, offloaded.dtype), offloaded)
        return loaded

    def __setitem__(self, key: Any, value: Tensor | None) -> None:
        before = self.offloaded_values.get(key)
        if (
            before is not None
            and before in self._names
            and not self.onloading_disabled
            and value is not None
        ):
            self.offloaded_values[key] = self.offload(to_tensor(value.detach(), before))
        else:
            super().__setitem__(key, value)


def _with_tensors(given: Any, hook: Any, tensors: dict[str, Tensor]) -> Any:
    """Return a hook, or several in one, that also has some tensors to load."""
    changed = copy.copy(hook)
    changed.weights_map = ChainMap(tensors, hook.weights_map)
    devices = {name: tensor.device for name, tensor in tensors.items()}
    changed.original_devices = {**hook.original_devices, **devices}
    if given is hook:
        return changed
    several = copy.copy(given)
    several.hooks = tuple(changed if each is hook else each for each in given.hooks)
    return several
