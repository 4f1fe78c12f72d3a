"""What ``oneshot`` returns and writes beside the tensors; how it finds models and tokenizers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import fake_quantize
from families import build, logits_of, saved, token_ids
from transformers import AutoTokenizer
from words import byte_tokenizer

import calipers
from calipers.errors import ModelLoadError

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

STATIC_FP8 = """
quantization_stage:
  quantization_modifiers:
    QuantizationModifier:
      targets: [Linear]
      ignore: [lm_head]
      scheme: FP8
      weight_observer: {name: mse, maxshrink: 0.3}
"""


def oneshot(model: Any, recipe: Any, dataset: Any = None, **options: Any) -> calipers.OneshotResult:
    return calipers.oneshot(model, recipe, dataset, progress=False, **options)


@pytest.mark.parametrize(
    "scheme", ["W4A16", "W4A16_ASYM", "W8A16", "FP8_BLOCK", "NVFP4A16", "MXFP4A16"]
)
def test_errors_are_those_of_the_weights(scheme: str) -> None:
    result = oneshot(build(), scheme)
    assert len(result.errors) == 14
    for name, error in result.errors.items():
        module = result.model.get_submodule(name)
        rounded = fake_quantize(
            module.weight.detach(),
            module.weight_scale,
            getattr(module, "weight_zero_point", None),
            module.quantization_scheme.weights,
            global_scale=getattr(module, "weight_global_scale", None),
        )
        exact = module.weight.detach().double()
        expected = float((rounded.double() - exact).norm() / exact.norm())
        assert error == pytest.approx(expected, rel=1e-5)
        assert 0 < error < 0.5


def test_the_result_tells_what_was_done(tmp_path: Path) -> None:
    data = token_ids()
    result = oneshot(build(), STATIC_FP8, data, output_dir=tmp_path / "out")
    assert result.output_dir == tmp_path / "out"
    assert result.recipe == calipers.load_recipe(STATIC_FP8)
    assert [module.name for module in result.plan.modules] == list(result.errors)
    assert result.coverage.tokens == dict.fromkeys(result.errors, data.numel())
    assert result.coverage.unseen == []
    observers = {"memoryless_mse(maxshrink=0.3)", "static_minmax"}
    assert {row["observer"] for row in result.plan.rows()} == observers
    written = json.loads((tmp_path / "out" / "calipers.json").read_text())
    assert written["calipers"] == calipers.__version__
    assert written["pipeline"] == "basic"
    assert (written["samples"], written["tokens"]) == (len(data), data.numel())
    assert written["weight_errors"] == dict(result.errors)
    assert written["coverage"] == {
        "on_unseen": "error",
        "tokens": result.coverage.tokens,
        "unseen": [],
        "scarce_experts": {},
        "applied": {},
    }


def test_without_an_output_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = oneshot(build(), "W4A16")
    assert result.output_dir is None
    assert result.coverage.tokens == {}
    assert list(tmp_path.iterdir()) == []


def test_the_written_recipe_gives_the_same_plan(tmp_path: Path) -> None:
    result = oneshot(build(), STATIC_FP8, token_ids(), output_dir=tmp_path / "out")
    again = calipers.load_recipe(tmp_path / "out" / "recipe.yaml")
    assert again.compile(build()).rows() == result.plan.rows()
    assert again == result.recipe


# Models and tokenizers


@pytest.mark.parametrize("spelled", [str, Path])
def test_a_model_is_loaded_from_its_folder(spelled: Callable[[Path], Any], tmp_path: Path) -> None:
    model = build(dtype=torch.bfloat16)
    folder = saved(model, tmp_path / "model")
    from_path = oneshot(spelled(folder), "W4A16")
    from_object = oneshot(model, "W4A16")
    assert from_path.model.dtype == torch.bfloat16
    assert torch.equal(logits_of(from_path.model), logits_of(from_object.model))


@pytest.mark.parametrize("pipeline", ["auto", "sequential"])
def test_the_tokenizer_beside_the_model_reads_text_and_is_saved(
    pipeline: Any, tmp_path: Path
) -> None:
    folder = saved(build(), tmp_path / "model")
    byte_tokenizer(bos=True, pad=True).save_pretrained(folder)
    texts = ["calipers measure", "once and quantize many", "a third text"]
    result = oneshot(folder, "FP8", texts, output_dir=tmp_path / "out", pipeline=pipeline)
    tokens = sum(len(text) + 1 for text in texts)
    assert set(result.coverage.tokens.values()) == {tokens}
    kept = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert kept("abc").input_ids == byte_tokenizer(bos=True)("abc").input_ids


def test_a_tokenizer_is_taken_as_an_object_or_from_a_folder(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "words")
    scales = [
        oneshot(build(), "FP8", ["some text of some length"], tokenizer=given)
        .model.get_submodule("model.layers.0.mlp.down_proj")
        .input_scale
        for given in (byte_tokenizer(), tmp_path / "words", str(tmp_path / "words"))
    ]
    assert torch.equal(scales[0], scales[1])
    assert torch.equal(scales[0], scales[2])


def test_token_ids_need_no_tokenizer(tmp_path: Path) -> None:
    folder = saved(build(), tmp_path / "model")
    result = oneshot(folder, "FP8", token_ids().tolist(), output_dir=tmp_path / "out")
    assert set(result.coverage.tokens.values()) == {token_ids().numel()}
    assert not list((tmp_path / "out").glob("*token*"))


# Code of a model


REMOTE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({mark!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def model_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose code leaves a mark when it is imported."""
    folder = saved(build(), tmp_path / "model")
    code = REMOTE.format(mark=str(tmp_path / "mark"))
    (folder / "own_code.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "own-llama"
    config["architectures"] = ["OwnForCausalLM"]
    config["auto_map"] = {
        "AutoConfig": "own_code.OwnConfig",
        "AutoModelForCausalLM": "own_code.OwnForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


def test_code_of_a_model_is_not_run(
    model_with_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # not even if somebody is asked
    with pytest.raises(ModelLoadError) as caught:
        oneshot(model_with_code, "W4A16", output_dir=tmp_path / "out")
    assert str(caught.value) == (
        f"The model '{model_with_code}' comes with Python code of its own, which was not run. Read "
        "it, and if you trust it pass trust_remote_code=True."
    )
    assert not (tmp_path / "mark").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pipeline", ["auto", "sequential"])
def test_code_of_a_model_is_run_if_asked(
    pipeline: Any, model_with_code: Path, tmp_path: Path
) -> None:
    result = oneshot(
        model_with_code,
        "W4A16",
        output_dir=tmp_path / "out",
        trust_remote_code=True,
        pipeline=pipeline,
    )
    assert (tmp_path / "mark").exists()
    assert type(result.model).__name__ == "OwnForCausalLM"
    assert (tmp_path / "out" / "own_code.py").exists()
