"""Whatever was done to a model, it comes back as it was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import anatomy, small
from compressed_tensors.modeling import initialize_hooked_attention
from compressed_tensors.offload import OffloadCache, offload_module
from compressed_tensors.quantization import (
    initialize_module_for_quantization,
    preset_name_to_scheme,
)
from models import small_llama
from torch import nn

from calipers.calibration.context import Snapshot, left_as_found, unchanged_on_error

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.register_buffer("shift", torch.ones(4))
        self.names, self.seen, self.table = ["a"], {1}, {"k": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) + self.shift


def ruin(model: Any) -> None:
    """Do everything that calibration does, and some more."""
    model.first.weight = nn.Parameter(torch.zeros(4, 4))
    model.first.register_parameter("weight_scale", nn.Parameter(torch.ones(1)))
    model.first.bias = None
    model.second = nn.Identity()
    model.extra = nn.Linear(1, 1)
    model.shift = torch.zeros(4)
    model.register_buffer("another", torch.zeros(1))
    model.first.forward = lambda x: x * 0
    model.first.quantization_scheme = "scheme"
    model.names.append("b")
    model.seen.add(2)
    model.table.clear()
    model.first.register_forward_pre_hook(lambda *_: None)
    model.first.register_forward_hook(lambda *_, **__: None, with_kwargs=True)
    model.register_forward_pre_hook(lambda *_: None, with_kwargs=True, prepend=True)
    model.eval()
    del model.first.in_features


def test_everything_comes_back() -> None:
    model, x = Block(), torch.randn(2, 4)
    own_forward = model.first.forward
    model.first.forward = own_forward  # of the instance, as some libraries set it
    model.first.register_forward_hook(lambda *_: None)
    before, result = anatomy(model), model(x)
    snapshot = Snapshot(model)
    ruin(model)
    assert anatomy(model) != before
    snapshot.restore()
    assert anatomy(model) == before
    assert model.first.forward is own_forward
    assert model.training
    assert model.first.training
    assert (model.names, model.seen, model.table) == (["a"], {1}, {"k": 1})
    assert torch.equal(model(x), result)


def test_restoring_twice_is_harmless() -> None:
    model = Block()
    before, snapshot = anatomy(model), Snapshot(model)
    for _ in range(2):
        ruin(model)
        snapshot.restore()
        assert anatomy(model) == before


def test_a_user_can_still_remove_a_hook() -> None:
    model, calls = nn.Linear(2, 2), []
    handles = [
        model.register_forward_hook(lambda *_: calls.append("after")),
        model.register_forward_pre_hook(lambda *_: calls.append("before"), with_kwargs=True),
    ]
    with left_as_found(model):
        model.register_forward_hook(lambda *_: calls.append("ours"))
        model(torch.zeros(1, 2))
    assert calls == ["before", "after", "ours"]
    model(torch.zeros(1, 2))
    assert calls[3:] == ["before", "after"]
    for handle in handles:
        handle.remove()
    assert all(not getattr(model, name) for name in HOOKS)
    model(torch.zeros(1, 2))
    assert len(calls) == 5


def test_a_hook_removed_meanwhile_is_back() -> None:
    """The model is left as it was found, not as somebody thought it was."""
    model = nn.Linear(2, 2)
    handle = model.register_forward_hook(lambda *_: None)
    with left_as_found(model):
        handle.remove()
        assert not model._forward_hooks
    assert list(model._forward_hooks) == [handle.id]


def interrupted(model: nn.Module) -> None:
    ruin(model)
    raise KeyboardInterrupt


@pytest.mark.parametrize("guard", [left_as_found, unchanged_on_error])
def test_an_exception_brings_it_back(guard: Any) -> None:
    model = Block()
    before = anatomy(model)
    with pytest.raises(KeyboardInterrupt), guard(model):
        interrupted(model)
    assert anatomy(model) == before


def test_without_an_exception_changes_stay() -> None:
    model = Block()
    with unchanged_on_error(model):
        model.note = "hello"
    assert model.note == "hello"


def test_leaving_brings_it_back() -> None:
    model = Block()
    before = anatomy(model)
    with left_as_found(model):
        ruin(model)
    assert anatomy(model) == before


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_implementation_comes_back(attention: str) -> None:
    model: Any = small_llama(attn_implementation=attention)
    ids = torch.arange(6).reshape(1, 6)
    before, logits = anatomy(model), model(ids).logits
    with left_as_found(model):
        for layer in model.model.layers:
            initialize_hooked_attention(model, layer.self_attn)
        assert model.config._attn_implementation not in ("eager", "sdpa")
    assert anatomy(model) == before
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    assert {config._attn_implementation for config in configs} == {attention}
    assert torch.equal(model(ids).logits, logits)


def test_parts_with_another_attention_keep_it() -> None:
    model: Any = small_llama(attn_implementation="sdpa")
    model.vision = small("mistral", attn_implementation="eager")
    with left_as_found(model):
        initialize_hooked_attention(model, model.model.layers[0].self_attn)
        assert model.vision.config._attn_implementation not in ("eager", "sdpa")
    assert model.config._attn_implementation == "sdpa"
    assert model.vision.config._attn_implementation == "eager"


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_modules_come_back(where: str, tmp_path: Path) -> None:
    model, x = Block(), torch.randn(2, 4)
    for linear in (model.first, model.second):
        options = {"offload_dir": str(tmp_path)} if where == "disk" else {}
        offload_module(linear, "cpu", where, **options)
    keys = [list(linear._parameters) for linear in (model.first, model.second)]
    result, snapshot = model(x), Snapshot(model)
    assert isinstance(model.first._parameters, OffloadCache)
    scheme = preset_name_to_scheme("FP8", ["Linear"])
    for linear in (model.first, model.second):
        initialize_module_for_quantization(linear, scheme)
        linear.register_forward_pre_hook(lambda *_: None)
    assert "weight_scale" in model.first._parameters
    snapshot.restore()
    assert [list(linear._parameters) for linear in (model.first, model.second)] == keys
    assert isinstance(model.first._parameters, OffloadCache)
    assert not hasattr(model.first, "weight_scale")
    assert not hasattr(model.first, "quantization_scheme")
    assert not model.first._forward_pre_hooks
    assert torch.equal(model(x), result)
