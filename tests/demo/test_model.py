"""The model that ships: what it is, and that it has learned."""

from __future__ import annotations

import json
import lzma
import math
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from calipers.demo import MODEL
from calipers.demo.text import library_texts

WINDOW = 256


@pytest.fixture(scope="module")
def unseen() -> bytes:
    return "".join(library_texts("evaluation").values()).encode()[: 128 * WINDOW]


def test_it_is_small_and_of_the_promised_shape() -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["hidden_size"] % 128 == 0
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 3e6
    with safe_open(MODEL / "model.safetensors", framework="pt") as tensors:
        stored = [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118
    assert {tensor.dtype for tensor in stored} == {torch.bfloat16}
    assert 0.8e6 < sum(tensor.numel() for tensor in stored) < 1.2e6
    assert all(tensor.isfinite().all() for tensor in stored)


def test_a_token_is_a_byte() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = "def f(x):\n\treturn 'é ∑ \U0001f600'\r\n" + "".join(map(chr, range(1, 256)))
    ids = tokenizer(text)["input_ids"]
    assert bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_it_has_learned(unseen: bytes) -> None:
    """It predicts modules it has not seen better than pairs of bytes and than lzma can."""
    bits = bits_per_byte(unseen)
    assert bits < 8 * len(lzma.compress(unseen, preset=9 | lzma.PRESET_EXTREME)) / len(unseen)
    assert bits < bits_of_pairs(unseen)
    assert bits < 2


@torch.no_grad()
def bits_per_byte(text: bytes) -> float:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    windows = torch.tensor(list(text)).view(-1, WINDOW)
    nats = [float(model(batch, labels=batch).loss) for batch in windows.split(16)]
    return sum(nats) / len(nats) / math.log(2)


def bits_of_pairs(text: bytes) -> float:
    """The entropy of a byte when the one before is known, with the pairs of this very text."""
    pairs = torch.zeros(256, 256, dtype=torch.float64)
    for before, after in pairwise(text):
        pairs[before, after] += 1
    odds = pairs / pairs.sum(1, keepdim=True).clamp(min=1)
    return float(-(pairs * odds.clamp(min=1e-300).log2()).sum() / pairs.sum())
