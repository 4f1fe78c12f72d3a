"""What can be folded in real architectures, against what they compute when it is done."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from models import random_model
from torch import Tensor, nn
from transformers import BloomConfig, LlamaConfig, NemotronConfig, OPTConfig

from calipers.topology.experts import unfuse_experts
from calipers.topology.folding import Fold, Folds, norm_offset

from .test_model import CONFIGS, SIZES, TINY

IDS = torch.randint(1, 64, (3, 12), generator=torch.Generator().manual_seed(0))
KINDS = {  # what is found in a layer, and of which kinds
    "llama": {"norm": 2, "values": 1, "up": 1},
    "gemma2": {"norm": 2, "values": 1, "up": 1},
    "olmo2": {"values": 1, "up": 1},
    "phi": {"norm": 1, "values": 1},
    "phi3": {"norm": 2},
    "gpt-neox": {"norm": 2},
    "opt": {"norm": 2, "values": 1},
    "mixtral": {"norm": 2, "values": 1, "up": 4},
    "cohere": {"norm": 1, "values": 1, "up": 1},
}


def build(family: str, **changes: Any) -> Any:
    """A model whose norms and biases are nothing special, with experts that are modules."""
    model: Any = random_model(CONFIGS[family], spread=0.2).float()
    for name, value in changes.items():
        setattr(model.config, name, value)
    unfuse_experts(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 1:
                start = 1.0 if name.endswith("weight") else 0.0
                tensor.copy_(start + 0.3 * torch.randn(tensor.shape, generator=generator))
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    result: Tensor = model(IDS, use_cache=False).logits
    return result


@torch.no_grad()
def apply(model: nn.Module, fold: Fold, factors: Tensor) -> None:
    """Fold by hand, in the plainest way."""
    source: Any = model.get_submodule(fold.source)
    if fold.kind == "norm":
        source.weight.copy_((source.weight + fold.offset) / factors - fold.offset)
    else:
        source.weight.div_(factors[:, None])
    if getattr(source, "bias", None) is not None:
        source.bias.div_(factors)
    for name in fold.readers:
        reader: Any = model.get_submodule(name)
        reader.weight.mul_(fold.expanded(factors))


@pytest.mark.parametrize("family", CONFIGS)
def test_folding_changes_nothing(family: str) -> None:
    model = build(family)
    expected = logits(model)
    folds = Folds.of(model)
    if family in KINDS:
        assert Counter(f.kind for f in folds.found if ".layers.0." in f.source) == KINDS[family]
    generator = torch.Generator().manual_seed(1)
    for fold in folds.found:
        apply(model, fold, torch.rand(fold.channels, generator=generator) * 3 + 0.2)
    assert not torch.equal(logits(model), expected)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=2e-5)


def test_heads_that_are_repeated_share_their_factors() -> None:
    fold = next(each for each in Folds.of(build("llama")).found if each.kind == "values")
    assert (fold.channels, fold.head_dim, fold.repeats) == (16, 8, 2)
    factors = torch.arange(16.0)
    expanded = fold.expanded(factors)
    assert expanded.reshape(2, 2, 8).tolist() == [
        [list(range(8))] * 2,
        [list(range(8, 16))] * 2,
    ]
    assert fold.by_channel(expanded).tolist() == [[float(x)] * 2 for x in range(16)]


@pytest.mark.parametrize(
    ("config", "source", "told"),
    [
        (
            NemotronConfig(**TINY),
            "model.layers.0.mlp.up_proj",
            "no gate multiplies it: an activation lies between it and its reader",
        ),
        (
            LlamaConfig(**TINY, tie_word_embeddings=True),
            "model.norm",
            "'lm_head' shares its weight with 'model.embed_tokens'",
        ),
        (
            BloomConfig(
                vocab_size=64, hidden_size=32, n_layer=2, n_head=4,
                apply_residual_connection_post_layernorm=True,
            ),
            "transformer.h.0.input_layernorm",
            "its output is added to the residual stream, too",
        ),
    ],
)  # fmt: skip
def test_obstacles(config: Any, source: str, told: str) -> None:
    folds = Folds.of(random_model(config))
    assert folds.obstacles[source] == told
    assert source not in {fold.source for fold in folds.found}


def test_clipped_values_are_left_alone() -> None:
    folds = Folds.of(build("llama", clip_qkv=8.0))
    assert folds.obstacles["model.layers.0.self_attn.v_proj"] == "values are clipped (clip_qkv)"


def test_norms_behind_blocks_are_left_alone() -> None:
    config = OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32, do_layer_norm_before=False,
    )  # fmt: skip
    assert {fold.kind for fold in Folds.of(random_model(config)).found} == {"values"}


def test_shared_norms_are_left_alone() -> None:
    model: Any = random_model(LlamaConfig(**TINY))
    first, second = model.model.layers
    second.input_layernorm.weight = first.input_layernorm.weight
    obstacles = Folds.of(model).obstacles
    name = "model.layers.{}.input_layernorm".format
    assert obstacles[name(0)] == f"'{name(0)}' shares its weight with '{name(1)}'"
    assert name(1) in obstacles


def test_a_block_that_does_more_is_left_alone() -> None:
    class Clamping(type(random_model(LlamaConfig(**TINY)).model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Any:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=1))

    model: Any = random_model(LlamaConfig(**SIZES))
    model.model.layers[1].mlp.__class__ = Clamping
    obstacles = Folds.of(model).obstacles
    assert obstacles == {
        "model.layers.1.mlp.up_proj": "Clamping does more than multiply it by a gate"
    }


@torch.no_grad()
def test_offsets_are_found_without_values() -> None:
    for family, offset in (("llama", 0.0), ("gemma", 1.0), ("cohere", 0.0), ("opt", 0.0)):
        model = random_model(CONFIGS[family]).to("meta")
        norms = [m for m in model.modules() if "norm" in type(m).__name__.lower()]
        assert norms
        assert {norm_offset(norm) for norm in norms} == {offset}

    class Squaring(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight

    assert norm_offset(Squaring(4)) is None
