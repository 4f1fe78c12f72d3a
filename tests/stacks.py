"""Classes of the installed library that stack experts, and modules of them."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from calipers.topology.experts import UnfusedExperts, unfuse_experts

EXPERTS, HIDDEN, INNER, TOKENS = 6, 16, 24, 11
MODELS = Path(transformers.__file__).parent / "models"

# Every name under which a config of the library keeps the sizes that experts ask for.
CONFIG = {
    **dict.fromkeys(
        ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"], EXPERTS
    ),
    **dict.fromkeys(["hidden_size"], HIDDEN),
    **dict.fromkeys(
        ["intermediate_size", "moe_intermediate_size", "expert_ffn_hidden_size"], INNER
    ),
    **dict.fromkeys(["hidden_act", "hidden_activation"], "silu"),
    "mlp_hidden_act": "relu2",
    "moe_latent_size": None,
    "n_shared_experts": 2,
    "swiglu_limit": 0.5,
    "swiglu_alpha": 1.7,
    "zero_expert_num": 0,
    "_experts_implementation": "eager",
}

# Classes that stack experts in a way that has no Linear per expert to call, and why.
REFUSED = {
    "Llama4TextExperts": "its forward does not take (hidden_states, top_k_index, top_k_weights)",
    "InklingSharedExperts": "parameters of unknown meaning: gate_proj",
}


def classes_with_stacks() -> dict[str, str]:
    """Every class of the library with a 3-D down_proj, and the module it is in."""
    found = {}
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "self.down_proj = nn.Parameter(" not in text:
            continue
        module = f"transformers.models.{path.parent.name}.{path.stem}"
        for block in re.split(r"\n(?=class |@)", text):
            if "self.down_proj = nn.Parameter(" in block:
                name = re.search(r"^class (\w+)", block, re.MULTILINE)
                assert name is not None
                found[name[1]] = module
    return found


CLASSES = classes_with_stacks()
SUPPORTED = sorted(CLASSES.keys() - REFUSED.keys())


def fused_module(name: str, **changes: Any) -> nn.Module:
    """An experts module of the library alone, with random weights in float64."""
    config = SimpleNamespace(**{**CONFIG, **changes})
    module: nn.Module = getattr(importlib.import_module(CLASSES[name]), name)(config).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def routed(tokens: int = TOKENS, top_k: int = 2, idle: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts and weights; the expert ``idle`` gets no token."""
    hidden = torch.randn(tokens, HIDDEN, dtype=torch.float64) * 2
    index = torch.rand(tokens, EXPERTS).index_fill(1, torch.tensor([idle]), -1).topk(top_k).indices
    return hidden, index, torch.rand(tokens, top_k, dtype=torch.float64)


def unfused(module: nn.Module) -> UnfusedExperts:
    parent = nn.Module()
    parent.experts = module
    assert unfuse_experts(parent) == ["experts"]
    swapped = parent.experts
    assert isinstance(swapped, UnfusedExperts)
    return swapped


class Handmade(nn.Module):
    """Experts of a class that declares nothing, in the shapes of the library."""

    def __init__(self, twist: bool = False, gated: bool = True) -> None:
        super().__init__()
        self.twist = twist
        self.act_fn = nn.SiLU()
        wide = {"gate_up_proj": 2 * INNER} if gated else {"up_proj": INNER}
        for name, width in wide.items():
            setattr(self, name, nn.Parameter(torch.randn(EXPERTS, HIDDEN, width).double()))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN).double())

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden)
        for token, position in torch.cartesian_prod(*map(torch.arange, experts.shape)).tolist():
            expert = experts[token, position]
            gate, up = (hidden[token] @ self.gate_up_proj[expert]).chunk(2, dim=-1)
            inner = self.act_fn(gate) * up
            inner = inner.relu() if self.twist and expert == EXPERTS - 1 else inner
            result[token] += weights[token, position] * (inner @ self.down_proj[expert])
        return result
