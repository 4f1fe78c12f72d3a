"""Small random models of many families, and what must not change about them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import random_model
from transformers import (
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

VOCABULARY = 260  # enough for the tokenizer of words.py
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MOE: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": (Qwen2MoeConfig, {**_MOE, "shared_expert_intermediate_size": 128}),
    "qwen3-moe": (Qwen3MoeConfig, {**_MOE, "head_dim": 32}),
}


def build(
    family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    kind, options = FAMILIES[family]
    return random_model(kind(**{**SIZES, **options, **changes}), dtype)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def token_ids(rows: int = 8, length: int = 32) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))


PROBE = token_ids(3, 24)


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    logits: torch.Tensor = model(PROBE, use_cache=False).logits
    return logits


class Untouched:
    """Remembers a model, and says whether it is the very same now."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._before = self._look()
        self._values = {n: t.detach().clone() for n, t in model.state_dict().items()}
        self._logits = logits_of(model)

    def check(self) -> None:
        assert self._look() == self._before
        now = self._model.state_dict()
        assert now.keys() == self._values.keys()
        for name, value in self._values.items():
            assert same_bits(now[name], value), name
        assert same_bits(logits_of(self._model), self._logits)

    def _look(self) -> dict[str, Any]:
        model = self._model
        return {
            "modules": [(name, id(module)) for name, module in model.named_modules()],
            "parameters": [(name, id(p)) for name, p in model.named_parameters()],
            "tied": id(model.get_output_embeddings().weight),
            "buffers": [(name, id(b)) for name, b in model.named_buffers()],
            "attributes": [(name, sorted(vars(m))) for name, m in model.named_modules()],
            "hooks": [
                (name, [*m._forward_hooks, *m._forward_pre_hooks])
                for name, m in model.named_modules()
            ],
            "config": model.config.to_json_string(),
        }


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, and NaN where the other is NaN."""
    return one.dtype == other.dtype and torch.equal(
        torch.nan_to_num(one, nan=12345.0), torch.nan_to_num(other, nan=12345.0)
    )
