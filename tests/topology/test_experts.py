"""Unfused experts: what they compute and keep, and what their layers see."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from stacks import EXPERTS, HIDDEN, INNER, TOKENS, Handmade, fused_module, routed, unfused
from torch import Tensor, nn

from calipers.numerics.tensors import current_mask, token_mask
from calipers.observers import Observer
from calipers.topology.experts import UnfusedExperts, unfuse_experts


def test_a_class_that_declares_nothing_is_tried() -> None:
    module, inputs = Handmade(), routed()
    before = torch.get_rng_state()
    torch.testing.assert_close(unfused(module)(*inputs), module(*inputs), rtol=0, atol=1e-10)
    assert torch.equal(torch.get_rng_state(), before)


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
        seen[expert] = (hidden, current_mask())

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
        assert current_mask() is not None
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
