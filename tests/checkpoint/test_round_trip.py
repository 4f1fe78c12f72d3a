"""Every scheme: transformers loads what was written and computes what the frozen model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen import (
    KV_FP8,
    freeze,
    llama,
    logits_of,
    mixtral,
    qwen2,
    qwen2_moe,
    scheme,
    unfuse,
)
from transformers import AutoModelForCausalLM, PreTrainedModel

from calipers.checkpoint.writer import write_checkpoint

SCHEMES = [
    "W4A16",
    "W4A16_ASYM",
    "W2A16",
    "W3A16",
    "W8A16",
    "W8A8",
    "W8A8_STATIC",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4",
    "NVFP4A16",
    "MXFP4A16",
    "MXFP8",
]
EPSILON = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def load(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)
    return model.eval()


def check_round_trip(model: PreTrainedModel, path: Path) -> None:
    before = logits_of(model)
    write_checkpoint(model, path, recipe="")
    loaded = load(path)
    assert loaded.dtype == model.dtype
    after = logits_of(loaded)
    assert torch.isfinite(before).all()
    error = (after - before).abs().max() / before.abs().max()
    assert error <= EPSILON[model.dtype], error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SCHEMES)
def test_scheme(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    check_round_trip(freeze(llama(dtype), scheme(name)), tmp_path / "out")
