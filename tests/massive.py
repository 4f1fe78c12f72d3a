"""A model with massive activations, as many have: a value of thousands, and others below one.

The first token of each text, and it alone, reaches the first channel of the hidden states; one
row of ``gate_proj`` and ``up_proj`` multiplies it by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from families import build

BOS = 256  # of the tokenizer of words.py
MASSIVE = "model.layers.0.mlp.down_proj"


def massive_llama(dtype: torch.dtype = torch.float32) -> Any:
    model: Any = build("llama", torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(20)
        model.model.embed_tokens.weight[:, 0] = 0
        model.model.embed_tokens.weight[BOS] = 0
        model.model.embed_tokens.weight[BOS, 0] = 50
        first = model.model.layers[0]
        first.self_attn.o_proj.weight[0] = 0
        gain = 55 / model.config.hidden_size**0.5
        for projection in (first.mlp.gate_proj, first.mlp.up_proj):
            projection.weight[7] = 0
            projection.weight[7, 0] = gain
        first.mlp.down_proj.weight[:, 7] /= 100
    return model.to(dtype)


def samples(count: int = 8, length: int = 48) -> list[list[int]]:
    """Texts of different lengths, each with the first token in front."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 256, (count, length), generator=generator).tolist()
    return [[BOS, *row[: length - 2 * index]] for index, row in enumerate(rows)]
