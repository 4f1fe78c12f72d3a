"""The one place where hooks are put on modules. A hook looks at a tensor and changes nothing."""

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
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from calipers.errors import HiddenQueriesError
from calipers.numerics.tensors import first_tensor
from calipers.planning.specs import ModuleKind

See = Callable[[Tensor], None]

_STATES = {"q": register_query_hook, "k": register_key_hook, "v": register_value_hook}


def register_hook(module: torch.nn.Module, base_name: str, see: See) -> RemovableHandle:
    """Show a tensor of a module, whenever it is computed, to a function.

    :param base_name: ``input`` or ``output`` of any module; ``q`` (after its positions are put in),
        ``k`` and ``v`` (as they enter the cache) of an attention module that :func:`expose_states`
        has prepared
    """

    def look(value: Any) -> None:
        tensor = first_tensor(value)
        if tensor is not None and tensor.numel():
            see(tensor)

    if base_name == "input":
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: look((args, kwargs)), with_kwargs=True
        )
    if base_name == "output":
        return module.register_forward_hook(lambda _, _args, output: look(output))
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
            raise HiddenQueriesError(type(model).__name__, implementation)
        initialize_hooked_attention(model, module)
