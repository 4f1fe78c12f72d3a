"""What differs between versions of compressed-tensors; vLLM pins one of its own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.utils.match import is_match, is_narrow_match
from torch.nn import Module

try:
    from compressed_tensors.quantization import is_cached_attention_module
except ImportError:  # before 0.18
    from compressed_tensors.quantization import is_attention_module

    def is_cached_attention_module(module: Module) -> bool:
        """Whether a module is attention that reads a cache of keys and values."""
        if not is_attention_module(module):
            return False
        parameters = inspect.signature(module.forward).parameters
        return "past_key_value" in parameters or "past_key_values" in parameters


_FILLED_IN = QuantizationArgs().observer
"""The observer of arguments for which nobody chose one: none, or before 0.19 a name."""


def named_observer(args: QuantizationArgs) -> str | None:
    """Return the observer that arguments name, if somebody chose one.

    Before 0.19 who chose ``memoryless_minmax`` cannot be told from who chose none.
    """
    return None if args.observer == _FILLED_IN else args.observer


def is_targeted(model: Module, targets: Iterable[str], name: str, module: Module) -> bool:
    """Whether a target matches a module, and neither its parent nor any of its parts.

    Before 0.18 ``is_narrow_match`` did not look at the parts.
    """
    parts = [(f"{name}.{inner}", part) for inner, part in module.named_modules() if inner]
    narrow = (target for target in targets if is_narrow_match(model, target, name, module))
    return any(not any(is_match(*part, target) for part in parts) for target in narrow)


__all__ = ["is_cached_attention_module", "is_targeted", "named_observer"]
