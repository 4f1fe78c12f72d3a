"""Experts in which a recipe quantizes nothing stay as they were."""

from __future__ import annotations

from stacks import HIDDEN, Handmade, fused_module
from torch import nn

from calipers.recipes import load_recipe
from calipers.recipes.compiling import plan_for
from calipers.steps import QuantizationModifier


def model_with(experts: nn.Module) -> nn.Module:
    model = nn.Module()
    model.mlp = nn.ModuleDict({"experts": experts, "out": nn.Linear(HIDDEN, HIDDEN)})
    return model


def test_those_that_are_ignored_are_not_unfused() -> None:
    """These could not be: they compute something else than experts do."""
    model = model_with(Handmade(twist=True))
    recipe = QuantizationModifier(scheme="W8A8", ignore=("re:.*experts.*",))
    assert plan_for(model, load_recipe(recipe)).names == ["mlp.out"]
    assert isinstance(model.mlp["experts"], Handmade)


def test_those_without_the_part_that_is_meant_are_fused_again() -> None:
    experts = fused_module("NemotronHExperts")
    model = model_with(experts)
    targets = ("re:.*experts.*gate_proj", "re:.*out")
    recipe = QuantizationModifier(scheme="W8A8", targets=targets, unmatched="ignore")
    assert plan_for(model, load_recipe(recipe)).names == ["mlp.out"]
    assert model.mlp["experts"] is experts
