"""Small random models of the classes people quantize."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

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


def random_model(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, spread: float = 0.05
) -> PreTrainedModel:
    """Always the same model; its positions are computed in float32 whatever its dtype is."""
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:  # a mean other than zero gives asymmetric formats work to do
                parameter.normal_(0.01, spread)
    return model
