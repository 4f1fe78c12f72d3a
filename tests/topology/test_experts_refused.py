"""Experts that cannot be unfused are refused, and the model stays as it was."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
from stacks import EXPERTS, REFUSED, Handmade, fused_module, unfused
from torch import nn

from calipers.errors import FusedExpertsError
from calipers.topology.experts import UnfusedExperts, fused_experts, unfuse_experts


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_modules_unfused_is_refused(name: str) -> None:
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
