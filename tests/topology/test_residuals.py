"""Where layers of real architectures add the output of a module to what they carry along."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import random_model
from transformers import Gemma2Config, GPTNeoXConfig, GraniteConfig, LlamaConfig, OPTConfig

from calipers.topology.model import decoder_layers
from calipers.topology.tracing import residuals_of, traced

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
INSIDE: dict[str, Any] = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
LLAMA = {"self_attn.o_proj": "", "mlp.down_proj": ".post_attention_layernorm"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LlamaConfig(**SIZES, **INSIDE), LLAMA),
        (
            OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
            {"self_attn.out_proj": "", "fc2": ".final_layer_norm"},
        ),
        # Both branches are added at once, the sum is scaled, outputs are normalized first.
        (GPTNeoXConfig(**SIZES, intermediate_size=48), {}),
        (GraniteConfig(**SIZES, **INSIDE, residual_multiplier=0.5), {}),
        (Gemma2Config(**SIZES, **INSIDE), {}),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_sums_are_found_where_a_layer_has_them(config: Any, expected: dict[str, str]) -> None:
    model: Any = random_model(config).eval()
    prefix, layer = list(decoder_layers(model).items())[1]
    with traced(prefix, layer) as trace, torch.no_grad():
        model(torch.randint(64, (2, 7), generator=torch.Generator().manual_seed(0)))
    linears = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    found = residuals_of(trace, linears)
    assert found == {f"{prefix}.{name}": prefix + reader for name, reader in expected.items()}
    assert not any(module._forward_hooks for module in layer.modules())
