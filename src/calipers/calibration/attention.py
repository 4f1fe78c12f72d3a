"""Queries, keys and values of attention modules: nobody sees them before they are exposed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.modeling import (
    initialize_hooked_attention,
    initialize_hooked_kv_cache,
    register_key_hook,
    register_query_hook,
    register_value_hook,
)
from torch.utils.hooks import RemovableHandle

from calipers.errors import ConfigurationError
from calipers.planning.specs import ModuleKind

_STATES = {"q": register_query_hook, "k": register_key_hook, "v": register_value_hook}


def register_state_hook(
    module: torch.nn.Module, base_name: str, look: Callable[[Any], None]
) -> RemovableHandle:
    """Show states of an attention module that :func:`expose_states` has prepared to a function.

    :param base_name: ``q`` (after its positions are put in), ``k`` or ``v`` (as they enter the
        cache)
    """
    handle: RemovableHandle = _STATES[base_name](module, lambda _, states: look(states))
    return handle


def expose_states(model: Any, module: torch.nn.Module, kind: ModuleKind) -> None:
    """Let queries, keys and values of an attention module be looked at and quantized."""
    if kind == "kv_cache":
        initialize_hooked_kv_cache(model, module)
    elif kind == "attention":
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        implementation = model.config._attn_implementation
        if implementation not in ALL_ATTENTION_FUNCTIONS:
            raise ConfigurationError(
                f"computes attention by '{implementation}', in which the queries cannot be seen "
                "or quantized",
                subject=type(model).__name__,
                hint='Call model.set_attn_implementation("sdpa") first, or quantize the keys and '
                "values alone (kv_cache_scheme)",
            )
        initialize_hooked_attention(model, module)
