from __future__ import annotations

import pytest
import torch
from models import small_llama

from calipers.errors import RecipeError
from calipers.steps import IMatrixGatherer


def test_linear_modules_that_are_not_ignored() -> None:
    found = IMatrixGatherer(ignore=["lm_head", "re:.*mlp.*"]).plan(small_llama(), "").measured
    assert list(found) == [
        f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1) for p in ("q", "k", "v", "o")
    ]


def test_other_modules_have_no_input_channels() -> None:
    found = IMatrixGatherer(targets="re:model.layers.0.*").plan(small_llama(), "").measured
    assert len(found) == 7


def test_no_linear_module() -> None:
    with pytest.raises(RecipeError, match="'Linear' matches no module of Sequential"):
        IMatrixGatherer().plan(torch.nn.Sequential(torch.nn.ReLU()), "")
    with pytest.raises(RecipeError, match="finds no Linear module in Sequential"):
        IMatrixGatherer(targets="ReLU").plan(torch.nn.Sequential(torch.nn.ReLU()), "")


def test_unknown_keys() -> None:
    with pytest.raises(RecipeError, match=r"unknown key 'ignored' in IMatrixGatherer.*'ignore'"):
        IMatrixGatherer(ignored=["lm_head"])
