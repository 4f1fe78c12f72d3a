"""A model in GGUF is quantized as the same numbers in safetensors are."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from families import build, saved, token_ids
from safetensors.torch import load_file
from shell import run
from words import ids_of

import calipers
from calipers.checkpoint.location import check_location
from calipers.checkpoint.reader import load_model, load_skeleton, load_tokenizer
from calipers.errors import ModelLoadError

pytest.importorskip("gguf", reason="gguf, which reads GGUF, is missing")
pytest.importorskip("accelerate", reason="accelerate, without which GGUF is not read, is missing")
from gguf_models import write_gguf

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.float32)],
)
def test_tensors_are_those_of_the_file(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    stored = write_gguf(build("qwen2"), file, kind)
    for place in (file, tmp_path):
        model, skeleton = load_model(place), load_skeleton(place)
        assert model.dtype == skeleton.dtype == dtype
        found = model.state_dict()
        assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in stored.items())
        assert found.keys() == skeleton.state_dict().keys()
    tokenizer = load_tokenizer(None, model)
    assert tokenizer is not None
    assert tokenizer("face")["input_ids"] == ids_of("face")


def test_commands_read_it(tmp_path: Path) -> None:
    stored = write_gguf(build("qwen2"), tmp_path / "model.gguf", "Q8_0")
    original = build("qwen2")
    original.load_state_dict(stored, strict=False)
    saved(original, tmp_path / "original")
    (tmp_path / "text.txt").write_text("once upon a time there was a cab " * 200)
    options = ("--data", "text.txt", "--samples", "8", "--seq-len", "64")

    def ended(*words: str) -> str:
        result = run(*words, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stdout

    scheme = ("--scheme", "W4A16", "--group-size", "32")
    assert "int4" in ended("plan", "model.gguf", *scheme)
    ended("measure", "model.gguf", *options, "--collect", "hessian", "-o", "seen.safetensors")
    known = ("--measurements", "seen.safetensors", "--method", "gptq")
    for name, given in (("plain", ()), ("data", (*options, "--method", "gptq")), ("known", known)):
        ended("quantize", "model.gguf", *scheme, *given, "-o", name)
        assert (tmp_path / name / "tokenizer.json").is_file()
    ended("quantize", "original", *scheme, "-o", "wanted")
    wanted, found = (load_file(tmp_path / n / "model.safetensors") for n in ("wanted", "plain"))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert "known" in ended("evaluate", "model.gguf", "plain", "known", *options)
    known_of_it = calipers.measure(original, token_ids(), progress=False)
    assert known_of_it.info is not None
    again = calipers.measure(tmp_path / "model.gguf", token_ids(), progress=False)
    assert again.info is not None
    assert again.info.fingerprint == known_of_it.info.fingerprint


def test_unsupported_modules_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "Model-Q4_0.GGUF"
    file.touch()
    for place in (file, tmp_path):
        text = f"Cannot load a model from '{file}': it does not begin as files in GGUF do"
        with pytest.raises(ModelLoadError, match="^" + re.escape(text)):
            calipers.oneshot(place, "W8A16")
    file.write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises(
        ModelLoadError, match=r"^The files of .* cannot be used \(Model-Q4_0\.GGUF\)"
    ):
        calipers.oneshot(file, "W8A16")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "gguf", None)
        text = f"'{file}' is in GGUF, and reading it needs gguf. Install what is missing with pip"
        with pytest.raises(ModelLoadError, match="^" + re.escape(text)):
            calipers.oneshot(file, "W8A16")
    (tmp_path / "other.gguf").touch()
    text = f"'{tmp_path}' holds several models in GGUF: Model-Q4_0.GGUF, other.gguf. Give one"
    with pytest.raises(ModelLoadError, match="^" + re.escape(text)):
        calipers.oneshot(tmp_path, "W8A16")
    with pytest.raises(
        ModelLoadError, match=r"is a model in GGUF, .* but not looked at in its files"
    ):
        check_location(str(file))
