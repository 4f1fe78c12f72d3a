"""Unfused experts compute what the fused ones do, for every class the installed library has."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor, nn

from calipers.calibration.experts import UnfusedExperts, fused_experts, unfuse_experts
from calipers.calibration.masks import current_mask, token_mask
from calipers.errors import FusedExpertsError
from calipers.observers import Observer

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
IN_FLOAT32 = {"OpenAIPrivacyFilterExperts"}  # whatever the dtype of its weights
UNDECLARED = {"LongcatFlashExperts", "Step3p7Experts"}


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


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_unfused_is_refused(name: str) -> None:
    model = nn.Module()
    model.mlp = fused_module(name)
    assert list(fused_experts(model)) == ["mlp"]
    with pytest.raises(FusedExpertsError, match=re.escape(REFUSED[name])) as caught:
        unfuse_experts(model)
    assert f"The experts of 'mlp' ({name}) are stacked" in str(caught.value)
    assert 'ignore: ["re:.*experts.*"]' in str(caught.value)
    assert type(model.mlp).__name__ == name


def test_experts_without_weights_of_their_own_are_refused() -> None:
    module = fused_module("LongcatFlashExperts", zero_expert_num=2)
    with pytest.raises(FusedExpertsError, match="shapes of its parameters do not match"):
        unfused(module)


@pytest.mark.parametrize("name", ["JetMoeParallelExperts", "AriaGroupedExpertsGemm"])
def test_other_stacks_of_experts_are_found_and_refused(name: str) -> None:
    package = "jetmoe" if name.startswith("Jet") else "aria"
    source = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    model = nn.Sequential(nn.Conv1d(4, 4, 3), getattr(source, name)(4, 8, 8))
    assert list(fused_experts(model)) == ["1"]
    with pytest.raises(FusedExpertsError, match=rf"'1' \({name}\) .* no 3-D down_proj"):
        unfuse_experts(model)


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


def test_a_class_that_declares_nothing_is_tried() -> None:
    module, inputs = Handmade(), routed()
    before = torch.get_rng_state()
    torch.testing.assert_close(unfused(module)(*inputs), module(*inputs), rtol=0, atol=1e-10)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        (Handmade(twist=True), r"random tokens would differ by 0\.\d+ of the largest value"),
        (Handmade(gated=False), "it does not run like experts do"),
        (Handmade().to("meta"), "its parameters are on 'meta'"),
    ],
)
def test_a_class_that_computes_something_else_is_refused(module: nn.Module, problem: str) -> None:
    with pytest.raises(FusedExpertsError, match=problem):
        unfused(module)


def test_obstacles_are_named() -> None:
    scaled, patched, small = (fused_module("MixtralExperts") for _ in range(3))
    scaled.gate_up_proj_scale_inv = nn.Parameter(torch.ones(EXPERTS, 1, 1))
    patched.forward = patched.forward
    small.down_proj = nn.Parameter(small.down_proj.detach().to(torch.float8_e4m3fn), False)
    gateless = fused_module("MixtralExperts")
    del gateless.act_fn
    for module, problem in [
        (scaled, "parameters of unknown meaning: gate_up_proj_scale_inv"),
        (patched, "its forward was replaced on the instance"),
        (small, "its parameters are already quantized"),
        (gateless, "its activation fails by itself (AttributeError"),
    ]:
        with pytest.raises(FusedExpertsError, match=re.escape(problem)):
            unfused(module)


def test_one_refusal_leaves_the_whole_model() -> None:
    model = nn.ModuleDict({"a": fused_module("MixtralExperts"), "b": Handmade(twist=True)})
    with pytest.raises(FusedExpertsError, match=r"'b' \(Handmade\)"):
        unfuse_experts(model)
    assert not any(isinstance(m, UnfusedExperts) for m in model.modules())
    assert unfuse_experts(model, names=["a"]) == ["a"]
    assert isinstance(model["a"], UnfusedExperts)
    assert isinstance(model["b"], Handmade)


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "NemotronHExperts"])
def test_no_tokens_and_experts_named_twice(name: str) -> None:
    module = fused_module(name)
    own = unfused(module)
    hidden, _, weights = routed()
    assert own(hidden[:0], torch.zeros(0, 2, dtype=torch.int64), weights[:0]).shape == (0, HIDDEN)
    twice = torch.full((TOKENS, 2), 3)
    expected = module(hidden, twice, weights)
    torch.testing.assert_close(own(hidden, twice, weights), expected, rtol=0, atol=1e-12)


def test_index_beyond_the_experts_means_none() -> None:
    module = fused_module("MixtralExperts", _experts_implementation="batched_mm")
    hidden, index, weights = routed()
    index[2:5, 1], weights[2:5, 1] = EXPERTS, 0
    expected = module(hidden, index, weights)
    torch.testing.assert_close(unfused(module)(hidden, index, weights), expected)


def test_attributes_and_submodules_stay() -> None:
    module = fused_module("DeepseekV4Experts").requires_grad_(False).eval()
    own = unfused(module)
    for name in ("num_experts", "hidden_dim", "intermediate_dim", "limit", "config", "act_fn"):
        assert getattr(own, name) is getattr(module, name)
    assert not any(m.training for m in own.modules())
    assert not any(p.requires_grad for p in own.parameters())
    assert "down_proj" not in dict(own.named_parameters())
    trained = unfused(fused_module("DeepseekV4Experts"))
    assert all(p.requires_grad for p in trained.parameters())


def test_unfused_experts_can_be_copied() -> None:
    own, inputs = unfused(fused_module("GptOssExperts")), routed()
    twin = copy.deepcopy(own)
    twin.get_submodule("0.up_proj").weight.data.zero_()
    assert not torch.equal(twin(*inputs), own(*inputs))
    twin.load_state_dict(own.state_dict())
    assert torch.equal(twin(*inputs), own(*inputs))


def test_weights_on_meta_need_no_memory() -> None:
    own = unfused(fused_module("MixtralExperts").to("meta"))
    assert all(p.is_meta for p in own.parameters())


def test_shared_experts_stay_shared() -> None:
    module = fused_module("MixtralExperts")
    model = nn.ModuleDict({"a": module, "b": nn.Sequential(module)})
    assert unfuse_experts(model) == ["a", "b.0"]
    assert isinstance(model["a"], UnfusedExperts)
    assert model["a"] is model.get_submodule("b.0")


def test_a_trial_is_no_forward_pass() -> None:
    module, calls = Handmade(), []
    module.register_forward_hook(lambda *_: calls.append("hook"))
    with token_mask(torch.tensor([[0, 1]])):
        own = unfused(module)
    assert calls == []
    own(*routed())
    assert calls == ["hook"]


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts", "NemotronHExperts"])
def test_half_precision_differs_by_rounding(name: str) -> None:
    module = fused_module(name)
    hidden, index, weights = routed()
    exact = module(hidden, index, weights)
    half = module.bfloat16()
    inputs = hidden.bfloat16(), index, weights.float()
    result = unfused(half)(*inputs)
    assert result.dtype == torch.bfloat16
    fused_error = (half(*inputs) - exact).abs().max()
    assert (result - exact).abs().max() <= 1.5 * fused_error


@pytest.mark.parametrize("name", ["MixtralExperts", "GptOssExperts"])
def test_observers_do_not_care_how_layers_lie_in_memory(name: str) -> None:
    linear = unfused(fused_module(name).float()).get_submodule("3.gate_proj")
    assert isinstance(linear, nn.Linear)
    assert linear.weight.is_contiguous() == (name == "MixtralExperts")
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=8)
    for observer in ("memoryless_minmax", "memoryless_mse"):
        own, other = (Observer.load_from_registry(observer, args=args) for _ in range(2))
        scale = own(linear.weight).get_qparams()["scale"]
        assert scale.shape == (INNER, HIDDEN // 8)
        assert torch.equal(
            scale, other(linear.weight.detach().contiguous().clone()).get_qparams()["scale"]
        )


def seen_by(own: UnfusedExperts, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[int, Any]]:
    """The result, and per expert what its up_proj saw and the mask at that time."""
    seen: dict[int, Any] = {}

    def remember(expert: int, hidden: Tensor) -> None:
        assert expert not in seen
        seen[expert] = (hidden, current_mask().mask)

    handles = [
        own.get_submodule(f"{i}.up_proj").register_forward_pre_hook(
            lambda _, args, i=i: remember(i, args[0])
        )
        for i in range(EXPERTS)
    ]
    result = own(*inputs)
    for handle in handles:
        handle.remove()
    return result, seen


def test_the_mask_follows_the_tokens() -> None:
    own, (hidden, index, weights) = unfused(fused_module("MixtralExperts")), routed(12)
    mask = torch.arange(12).reshape(3, 4) % 4 > 0
    with token_mask(mask):
        _, seen = seen_by(own, (hidden, index, weights))
        assert current_mask().mask is not None
    assert sorted(seen) == [0, 1, 2, 3, 5]
    for expert, (states, narrowed) in seen.items():
        tokens = [int(torch.where((hidden == row).all(1))[0]) for row in states]
        assert sorted(tokens) == torch.where((index == expert).any(1))[0].tolist()
        counted = [token % 4 > 0 for token in tokens]
        assert narrowed is None if all(counted) else narrowed.tolist() == counted
    assert any(narrowed is not None for _, narrowed in seen.values())


def test_all_experts_can_see_all_tokens() -> None:
    own, inputs = unfused(fused_module("MixtralExperts")), routed(12)
    assert own.calibrate_all_experts is False
    expected = own(*inputs)
    own.calibrate_all_experts = True
    mask = torch.arange(12).reshape(3, 4) % 4 > 0
    with token_mask(mask):
        result, seen = seen_by(own, inputs)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
    assert sorted(seen) == list(range(EXPERTS))
    for states, whole in seen.values():
        assert torch.equal(states, inputs[0])
        assert torch.equal(whole, mask)


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
