from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import build, saved
from words import byte_tokenizer

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 400


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with its tokenizer, in a folder."""
    folder = saved(build("llama tied", torch.bfloat16), tmp_path_factory.mktemp("cli") / "model")
    byte_tokenizer(bos=True, eos=True).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of text."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(TEXT)
    return path
