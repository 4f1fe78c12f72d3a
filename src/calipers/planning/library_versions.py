"""What older versions of compressed-tensors do not have; vLLM may hold them back."""

from __future__ import annotations

import inspect

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


__all__ = ["is_cached_attention_module"]
