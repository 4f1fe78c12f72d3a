"""Every scheme: transformers loads what was written and computes what the frozen model computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from frozen import (
    KV_FP8,
    SCHEMES,
    freeze,
    llama,
    logits_of,
    qwen2,
    scheme,
)
from pairwise import in_turns
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from calipers.checkpoint.writer import write_checkpoint
from calipers.errors import CalipersWarning

# transformers decodes these to bfloat16 and then cannot multiply them with float32.
BFLOAT16_ONLY = ["NVFP4", "NVFP4A16", "MXFP4A16", "MXFP8"]
EPSILON = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def load(path: Path, **options: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, **options)
    return model.eval()


def check_round_trip(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    before = logits_of(model)
    write_checkpoint(model, path, recipe="")
    loaded = load(path)
    assert loaded.dtype == model.dtype
    check_equal(logits_of(loaded), before)
    assert torch.equal(logits_of(model), before)
    return loaded


def check_equal(after: torch.Tensor, before: torch.Tensor) -> None:
    assert torch.isfinite(before).all()
    error = (after - before).abs().max() / before.abs().max()
    assert error <= EPSILON[after.dtype], error


@pytest.mark.parametrize(("name", "dtype"), in_turns([*SCHEMES], [torch.bfloat16, torch.float32]))
def test_scheme(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if name in BFLOAT16_ONLY else dtype
    check_round_trip(freeze(llama(dtype), scheme(name)), tmp_path / "out")


@pytest.mark.parametrize("name", BFLOAT16_ONLY)
def test_scheme_that_is_decoded_as_bfloat16(name: str, tmp_path: Path) -> None:
    model = freeze(llama(), scheme(name))
    with pytest.warns(CalipersWarning, match=r"to bfloat16, and this model is torch.float32"):
        write_checkpoint(model, tmp_path / "out", recipe="")
    with pytest.raises(RuntimeError, match="dtype"):
        logits_of(load(tmp_path / "out"))
    loaded = load(tmp_path / "out", dtype=torch.bfloat16)
    logits_of(loaded)  # decompresses it
    for name, module in quantized_modules(model):
        weight = forward_quantize(
            module, module.weight, "weight", module.quantization_scheme.weights
        )
        assert torch.equal(loaded.get_submodule(name).weight, weight.bfloat16())


def quantized_modules(model: PreTrainedModel) -> list[tuple[str, torch.nn.Module]]:
    found = [(n, m) for n, m in model.named_modules() if hasattr(m, "quantization_scheme")]
    assert found
    return found


def test_unquantized_differs_from_quantized() -> None:
    """The comparison can fail: what quantization does is larger than what it lets pass."""
    plain = logits_of(llama())
    for name in SCHEMES:
        changed = logits_of(freeze(llama(), scheme(name)))
        with pytest.raises(AssertionError):
            check_equal(changed, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kv_cache(dtype: torch.dtype, tmp_path: Path) -> None:
    model = freeze(llama(dtype), scheme("FP8"), kv_cache=KV_FP8)
    check_round_trip(model, tmp_path / "out")
    names = tensors_of(tmp_path / "out")
    assert "model.layers.1.self_attn.k_scale" in names
    assert "model.layers.0.self_attn.v_scale" in names
    assert not [name for name in names if "kv_cache" in name]


def test_kv_cache_alone(tmp_path: Path) -> None:
    check_round_trip(freeze(llama(), kv_cache=KV_FP8), tmp_path / "out")


def test_attention(tmp_path: Path) -> None:
    attention = QuantizationScheme(targets=["LlamaAttention"], input_activations=KV_FP8)
    model = freeze(llama(), scheme("W8A8"), attention)
    check_round_trip(model, tmp_path / "out")
    assert "model.layers.1.self_attn.q_scale" in tensors_of(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_mixed_schemes(dtype: torch.dtype, tmp_path: Path) -> None:
    model = freeze(
        llama(dtype),
        scheme("FP8", ("re:.*self_attn.*",)),
        scheme("W4A16", ("re:.*mlp.*",)),
    )
    check_round_trip(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    formats = {group["format"] for group in config["config_groups"].values()}
    assert formats == {"float-quantized", "pack-quantized"}


def test_two_schemes_with_the_same_targets(tmp_path: Path) -> None:
    """Two modifiers may both say "Linear" and ignore what the other takes."""
    model = freeze(llama(), scheme("W4A16"), ignore=("lm_head", "re:.*self_attn.*"))
    attention = QuantizationScheme(targets=["LlamaAttention"], input_activations=KV_FP8)
    freeze(model, scheme("W8A8"), attention, ignore=("lm_head", "re:.*mlp.*"))
    check_round_trip(model, tmp_path / "out")


def test_biases_and_tied_embeddings(tmp_path: Path) -> None:
    model = freeze(qwen2(tie_word_embeddings=True), scheme("W4A16"))
    loaded = check_round_trip(model, tmp_path / "out")
    names = tensors_of(tmp_path / "out")
    assert "lm_head.weight" not in names
    assert "model.layers.0.self_attn.q_proj.bias" in names
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight or torch.equal(
        loaded.lm_head.weight, loaded.model.embed_tokens.weight
    )


def test_embeddings_untied_for_a_quantized_head(tmp_path: Path) -> None:
    model = qwen2(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    freeze(model, scheme("W8A16"), ignore=())
    check_round_trip(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert model.config.tie_word_embeddings is True


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
