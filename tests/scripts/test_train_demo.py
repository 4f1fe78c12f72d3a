"""The script that trained the model: the same seed gives the same model, and it learns."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_demo.py"
TEXT = torch.tensor([256, *(b"for i in range(10):\n    print(i)\n" * 40)])


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("train_demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(script: Any, monkeypatch: pytest.MonkeyPatch, steps: int) -> Any:
    monkeypatch.setattr(script, "BATCH", 2)
    monkeypatch.setattr(script, "WINDOW", 64)
    monkeypatch.setattr(script, "WARM_UP", 5)
    torch.manual_seed(7)
    return script.train(script.new_model(), TEXT, steps)


def test_the_same_seed_gives_the_same_model(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (trained(script, monkeypatch, 3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_it_writes(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = trained(script, monkeypatch, 40)
    bits = script.bits_of_model(model, TEXT)
    assert bits < 4 < script.bits_of_model(script.new_model(), TEXT)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    script.byte_tokenizer().save_pretrained(tmp_path)
    script.write_readme(tmp_path, {"this model": bits}, TEXT, 7, 40, 1.0)
    assert f"| this model | {bits:.3f} |" in (tmp_path / "README.md").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path)("é")["input_ids"] == [0xC3, 0xA9]


def test_bits_of_bigrams_by_hand(script: Any) -> None:
    learned, text = torch.tensor([256, 65, 66, 65, 66]), torch.tensor([65, 66, 67])
    after_a = (2 + 1) / (2 + 257)  # "B" after "A", twice
    after_b = 1 / (1 + 257)  # "C" after "B", never; "B" was followed once
    expected = -(math.log2(after_a) + math.log2(after_b)) / 2
    assert script.bits_of_bigrams(learned, text) == pytest.approx(expected, rel=1e-12)
