"""Small random models of the classes people quantize."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}


def small_llama(**changes: Any) -> torch.nn.Module:
    return LlamaForCausalLM(LlamaConfig(**{**_SMALL, **changes}))


def small_mixtral(**changes: Any) -> torch.nn.Module:
    sizes = {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **changes}))
