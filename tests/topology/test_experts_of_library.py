"""Unfused experts compute what the fused ones do, for every class the installed library has."""

from __future__ import annotations

import pytest
import torch
import transformers
from stacks import (
    CLASSES,
    EXPERTS,
    HIDDEN,
    INNER,
    REFUSED,
    SUPPORTED,
    fused_module,
    routed,
    unfused,
)
from torch import nn

from calipers.topology.experts import fused_experts, unfuse_experts

IN_FLOAT32 = {"OpenAIPrivacyFilterExperts"}  # whatever the dtype of its weights
UNDECLARED = {"LongcatFlashExperts", "Step3p7Experts"}


def test_the_library_is_searched() -> None:
    assert len(SUPPORTED) >= 50
    assert {"MixtralExperts", "Qwen3MoeExperts", "GptOssExperts", "NemotronHExperts"} < {*SUPPORTED}
    assert REFUSED.keys() | UNDECLARED < CLASSES.keys()


@pytest.mark.parametrize("name", SUPPORTED)
def test_result_is_that_of_the_fused_module(name: str) -> None:
    module = fused_module(name)
    inputs = routed()
    expected = module(*inputs)
    assert expected.abs().max() > 0.1
    close = 1e-4 if name in IN_FLOAT32 else 1e-12
    torch.testing.assert_close(unfused(module)(*inputs), expected, rtol=0, atol=close)


@pytest.mark.parametrize("name", SUPPORTED)
def test_layers_look_into_the_stacked_memory(name: str) -> None:
    module = fused_module(name)
    memory = {p.untyped_storage().data_ptr() for p in module.parameters()}
    own = unfused(module)
    assert {p.untyped_storage().data_ptr() for p in own.parameters()} == memory
    assert sum(p.numel() for p in own.parameters()) == sum(p.numel() for p in module.parameters())
    projections = {n.split(".", 1)[1] for n, m in own.named_modules() if isinstance(m, nn.Linear)}
    gate = set() if name == "NemotronHExperts" else {"gate_proj"}
    assert projections == {"up_proj", "down_proj"} | gate
    sizes = own.get_submodule("3.up_proj"), own.get_submodule("3.down_proj")
    assert [(m.in_features, m.out_features) for m in sizes] == [(HIDDEN, INNER), (INNER, HIDDEN)]
    biases = [m.bias is not None for m in own.modules() if isinstance(m, nn.Linear)]
    assert all(biases) == any(biases) == (name in ("GptOssExperts", "OpenAIPrivacyFilterExperts"))


# Whole models


SMALL = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FEW = {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": INNER}


def whole_model(name: str, dtype: torch.dtype) -> nn.Module:
    sizes = {
        "Mixtral": {"num_local_experts": EXPERTS},
        "Qwen2Moe": {**FEW, "shared_expert_intermediate_size": INNER},
        "Qwen3Moe": {**FEW, "head_dim": 8},
    }[name]
    config = getattr(transformers, f"{name}Config")(**SMALL, **sizes)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype).eval()
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the default one has no float64
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("name", ["Mixtral", "Qwen2Moe", "Qwen3Moe"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@torch.no_grad()
def test_a_model_gives_the_same_logits(name: str, dtype: torch.dtype, close: float) -> None:
    model = whole_model(name, dtype)
    tokens = torch.randint(0, 64, (2, 9))
    padding = torch.ones(2, 9, dtype=torch.int64)
    padding[1, :4] = 0
    before = model(tokens, attention_mask=padding).logits
    old = fused_experts(model)
    saved = {n: {k: p.clone() for k, p in m.named_parameters()} for n, m in old.items()}
    names = unfuse_experts(model)
    assert names == list(old) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert isinstance(model.get_submodule(f"{names[1]}.5.gate_proj"), nn.Linear)
    after = model(tokens, attention_mask=padding).logits
    assert before.abs().max() > 0.5
    torch.testing.assert_close(after, before, rtol=close, atol=close)

    for module_name, module in old.items():
        assert saved[module_name].keys() == dict(module.named_parameters()).keys()
        assert all(torch.equal(p, saved[module_name][k]) for k, p in module.named_parameters())
        model.set_submodule(module_name, module)
    assert torch.equal(model(tokens, attention_mask=padding).logits, before)
