"""What a topology says of real architectures, against what flows through them when they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models import random_model
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from calipers.numerics.tensors import first_tensor
from calipers.topology.experts import unfuse_experts
from calipers.topology.model import Topology

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TINY: dict[str, Any] = {**SIZES, "head_dim": 8}
MOE: dict[str, Any] = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
FALCON: dict[str, Any] = {**SIZES, "new_decoder_architecture": False, "alibi": False}
CONFIGS = {
    "llama": LlamaConfig(**TINY),
    "llama-tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "mistral": MistralConfig(**TINY),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**TINY),
    "mixtral": MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=16),
    "qwen3-moe": Qwen3MoeConfig(**TINY, **MOE),
    "gemma": GemmaConfig(**TINY),
    "gemma2": Gemma2Config(**TINY),
    "gemma3": Gemma3TextConfig(**TINY),
    "phi": PhiConfig(**SIZES),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "gpt-neox": GPTNeoXConfig(**SIZES),
    "gpt-neox-serial": GPTNeoXConfig(**SIZES, use_parallel_residual=False),
    "falcon": FalconConfig(**FALCON, parallel_attn=True),
    "falcon-serial": FalconConfig(**FALCON, parallel_attn=False),
    "cohere": CohereConfig(**SIZES),
    "glm4": Glm4Config(**TINY, pad_token_id=0),
    "olmo2": Olmo2Config(**SIZES),
    "opt": OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        word_embed_proj_dim=32,
    ),
    "deepseek-v3": DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    ),
}  # fmt: skip


class Flow:
    """What flowed through a model: the input of each matrix, the output of each norm."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        handles = []
        for name, module in model.named_modules():
            if "norm" in type(module).__name__.lower():
                handles.append(module.register_forward_hook(self._after(name)))
            elif not list(module.children()) and not isinstance(module, nn.Embedding):
                handles.append(module.register_forward_pre_hook(self._before(name)))
        with torch.no_grad():
            ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(0))
            model(ids, use_cache=False)  # a cache copies what goes into it
        for handle in handles:
            handle.remove()

    def _before(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any) -> None:
            weight = getattr(module, "weight", None)
            value = first_tensor(args)
            if value is not None and (weight is None or weight.ndim == 2):
                self.inputs[name] = value

        return keep

    def _after(self, name: str) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            self.outputs[name] = output

        return keep

    def norms(self) -> Iterator[tuple[str, str]]:
        """The matrices with the norm whose output they read: the tensor or a view of it."""
        for name, value in self.inputs.items():
            for norm, output in self.outputs.items():
                is_whole = value.data_ptr() == output.data_ptr() and value.numel() == output.numel()
                if is_whole or (".experts." in name and _are_rows_of(value, output)):
                    yield name, norm


def _are_rows_of(value: Tensor, output: Tensor) -> bool:
    if value.shape[-1] != output.shape[-1]:
        return False
    rows = output.flatten(0, -2)
    return all(any(torch.equal(row, other) for other in rows) for row in value.flatten(0, -2))


@pytest.fixture(scope="module", params=CONFIGS, ids=str)
def family(request: pytest.FixtureRequest) -> tuple[str, nn.Module, Topology, Flow]:
    model = random_model(CONFIGS[request.param]).eval()
    unfuse_experts(model)
    return request.param, model, Topology.of(model), Flow(model)


def test_norms_are_those_whose_output_is_read(
    family: tuple[str, nn.Module, Topology, Flow],
) -> None:
    _, model, topology, flow = family
    flowed = dict(flow.norms())
    matrices = {n for n, m in model.named_modules() if getattr(m, "weight", None) is not None}
    expected = {reader: norm for reader, norm in flowed.items() if reader in matrices}
    assert expected
    idle = {n for n in topology.norms if ".experts." in n and n not in flow.inputs}
    assert {n: topology.norms[n] for n in topology.norms if n not in idle} == expected
    for norm in set(topology.norms.values()):
        assert norm in flow.outputs


def test_shared_inputs_are_one_tensor(family: tuple[str, nn.Module, Topology, Flow]) -> None:
    _, model, topology, flow = family
    linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    groups = topology.shared_inputs(linears)
    assert sorted(name for group in groups for name in group) == sorted(linears)
    pointers: dict[int, set[int]] = defaultdict(set)
    for number, group in enumerate(groups):
        for name in set(group) & flow.inputs.keys():
            pointers[flow.inputs[name].data_ptr()].add(number)
            assert flow.inputs[name].data_ptr() == flow.inputs[group[0]].data_ptr(), name
    assert all(len(numbers) == 1 for numbers in pointers.values())


def test_layers(family: tuple[str, nn.Module, Topology, Flow]) -> None:
    _, model, topology, _ = family
    assert len(topology.layers) == 2
    for name, _ in model.named_modules():
        inside = [layer for layer in topology.layers if f"{name}.".startswith(f"{layer}.")]
        assert topology.layer_of(name) == (inside[0] if inside else None)


def test_a_norm_of_another_size_is_not_in_front() -> None:
    model: Any = random_model(CONFIGS["llama"])
    before = Topology.of(model)
    layer = model.model.layers[1]
    layer.post_attention_layernorm.weight = nn.Parameter(torch.ones(8))
    after = Topology.of(model)
    lost = before.norms.keys() - after.norms.keys()
    assert lost == {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"}


def test_unknown_norms_are_not_guessed_at() -> None:
    model: Any = random_model(CONFIGS["llama"])
    model.model.layers[0].extra_norm = nn.RMSNorm(32)
    readers = Topology.of(model).norms
    assert not any(name.startswith("model.layers.0.") for name in readers)
    assert any(name.startswith("model.layers.1.") for name in readers)
