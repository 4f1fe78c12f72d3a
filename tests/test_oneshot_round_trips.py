"""From a recipe to a checkpoint, and back with transformers: every scheme, many families."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme, fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from families import build, logits_of, token_ids
from pairwise import in_turns
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import calipers
from calipers import OneshotResult
from calipers.checkpoint.state import stored_module_names

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

FP32, BF16 = torch.float32, torch.bfloat16
STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
KV_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
PRESETS = [
    "W4A16",
    "W4A16_ASYM",
    "W2A16",
    "W3A16",
    "W5A16",
    "W6A16",
    "W7A16",
    "W8A16",
    "W8A8",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4",
    "NVFP4A16",
    "MXFP4",
    "MXFP4A16",
    "MXFP8",
    "MXFP8A16",
]
DECODED_TO_BF16 = {"NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP8", "MXFP8A16"}
DECODED_TO_BF16 |= {"mixed floats"}


def recipe(scheme: Any = None, *, ignore: Any = ("lm_head",), **options: Any) -> dict[str, Any]:
    given = {"scheme": scheme} if scheme is not None else {}
    modifier = {"ignore": list(ignore), **given, **options}
    if not isinstance(scheme, dict):
        modifier.setdefault("targets", ["Linear"])
    return {"modifiers": [{"QuantizationModifier": modifier}]}


def gptq(scheme: Any = None, **options: Any) -> dict[str, Any]:
    (modifier,) = recipe(scheme, **options)["modifiers"]
    return {"modifiers": [{"GPTQModifier": modifier["QuantizationModifier"]}]}


RECIPES: dict[str, dict[str, Any]] = {
    **{name: recipe(name) for name in PRESETS},
    "W8A8 static": recipe(weights={"num_bits": 8, "strategy": "channel"}, input_activations=STATIC),
    "W8A8 static asym": recipe(
        weights={"num_bits": 8, "strategy": "channel"},
        input_activations={**STATIC, "symmetric": False},
    ),
    "kv": {"modifiers": [{"QuantizationModifier": {"kv_cache_scheme": KV_CACHE}}]},
    "W4A16 + kv": recipe("W4A16", kv_cache_scheme=KV_CACHE),
    "FP8 + kv": recipe("FP8", kv_cache_scheme=KV_CACHE),
    "mixed": recipe({"W4A16": ["re:.*mlp.*"], "W8A8": ["re:.*self_attn.*"]}),
    "mixed floats": recipe({"NVFP4A16": ["re:.*mlp.*"], "FP8_DYNAMIC": ["re:.*self_attn.*"]}),
    "W8A16 with head": recipe("W8A16", ignore=[]),
}

DTYPES_IN_TURNS = in_turns([*RECIPES], [FP32, BF16])

GPTQ_RECIPES: dict[str, dict[str, Any]] = {
    "W4A16_ASYM": gptq("W4A16_ASYM"),
    "W8A8 + kv": gptq("W8A8", kv_cache_scheme=KV_CACHE),
    "FP8": gptq("FP8"),
    "FP8_BLOCK": gptq("FP8_BLOCK"),
    "NVFP4A16": gptq("NVFP4A16"),
    "MXFP4A16": gptq("MXFP4A16"),
    "signed": gptq("W4A16", weight_observer={"name": "optimal", "signed_scale": True}),
}


def quantized(model: PreTrainedModel, recipe: Any, path: Path, **options: Any) -> OneshotResult:
    return calipers.oneshot(model, recipe, token_ids(), output_dir=path, progress=False, **options)


def load(path: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path)
    return model.eval()


def check_round_trip(result: OneshotResult, original: torch.Tensor) -> PreTrainedModel:
    """The loaded model computes what the frozen one does, and that is not what it did before."""
    assert result.output_dir is not None
    frozen = logits_of(result.model)
    loaded = load(result.output_dir)
    assert loaded.dtype == result.model.dtype
    now = logits_of(loaded)
    assert torch.isfinite(frozen).all()
    assert not torch.equal(frozen, original)
    worst = float((now - frozen).abs().max() / frozen.abs().max())
    assert worst <= torch.finfo(loaded.dtype).eps, worst
    return loaded


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, BF16 if name in DECODED_TO_BF16 else dtype) for name, dtype in DTYPES_IN_TURNS],
    ids=str,
)
def test_every_scheme_on_llama(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build("llama", dtype)
    original = logits_of(model)
    result = quantized(model, RECIPES[name], tmp_path / "out")
    check_tensors(result)
    check_round_trip(result, original)


@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4", "MXFP8A16"])
def test_a_float32_model_in_a_format_that_is_decoded_to_bfloat16(name: str, tmp_path: Path) -> None:
    check_tensors(quantized(build("llama", FP32), RECIPES[name], tmp_path / "out"))


@pytest.mark.parametrize(("name", "dtype"), in_turns([*GPTQ_RECIPES], [FP32, BF16]), ids=str)
def test_error_feedback_in_every_kind_of_format(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = build("llama", dtype)
    original = logits_of(model)
    result = quantized(model, GPTQ_RECIPES[name], tmp_path / "out")
    if dtype is BF16 or name not in DECODED_TO_BF16:
        check_round_trip(result, original)


@pytest.mark.parametrize(
    ("name", "family"),
    in_turns(
        ["W4A16", "W4A16_ASYM", "W8A8 static", "FP8", "NVFP4", "kv"],
        ["llama tied", "qwen2", "mistral"],
    ),
)
def test_other_families(family: str, name: str, tmp_path: Path) -> None:
    model = build(family, BF16)
    original = logits_of(model)
    result = quantized(model, RECIPES[name], tmp_path / "out")
    check_tensors(result)
    loaded = check_round_trip(result, original)
    tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert tied == (family != "mistral")


@pytest.mark.parametrize("family", ["llama tied", "qwen2"])
def test_a_quantized_head_is_no_longer_tied(family: str, tmp_path: Path) -> None:
    model = build(family, BF16)
    embedding = model.get_input_embeddings().weight.detach().clone()
    original = logits_of(model)
    result = quantized(model, RECIPES["W8A16 with head"], tmp_path / "out")
    assert "lm_head" in result.errors
    loaded = check_round_trip(result, original)
    assert torch.equal(loaded.get_input_embeddings().weight, embedding)
    assert not loaded.config.tie_word_embeddings


def test_an_embedding_can_be_quantized(tmp_path: Path) -> None:
    """transformers leaves embeddings as they are; the tensors say what vLLM would read."""
    model = build("llama", BF16)
    wanted = recipe("W8A16", targets=["Embedding"], ignore=[])
    result = quantized(model, wanted, tmp_path / "out")
    assert list(result.errors) == ["model.embed_tokens"]
    assert check_tensors(result) == 1


# Experts. transformers fuses them while it loads: it can decode only some formats on the way, and
# their inputs are not quantized.

LOADED_EXPERTS = ["W4A16", "W8A16", "W3A16", "MXFP4A16"]
STORED_EXPERTS = ["W4A16_ASYM", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP8"]


def experts_recipe(name: str) -> dict[str, Any]:
    """The routers stay as they are."""
    return recipe(name, ignore=["lm_head", "re:.*shared_expert_gate"])


def without_absent(wanted: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Ignore only what the family has."""
    if not any("shared_expert_gate" in name for name, _ in model.named_modules()):
        wanted["modifiers"][0]["QuantizationModifier"]["ignore"].remove("re:.*shared_expert_gate")
    return wanted


@pytest.mark.parametrize(
    ("name", "family"), in_turns(LOADED_EXPERTS, ["mixtral", "qwen2-moe", "qwen3-moe"])
)
def test_experts_are_loaded(family: str, name: str, tmp_path: Path) -> None:
    model = build(family, BF16)
    original = logits_of(model)
    wanted = without_absent(experts_recipe(name), model)
    result = quantized(model, wanted, tmp_path / "out", calibrate_all_experts=True)
    assert sum(".experts." in module for module in result.errors) == 2 * 4 * 3
    check_tensors(result)
    check_round_trip(result, original)


@pytest.mark.parametrize(("name", "family"), in_turns(STORED_EXPERTS, ["mixtral", "qwen2-moe"]))
def test_experts_are_stored(family: str, name: str, tmp_path: Path) -> None:
    model = build(family, BF16)
    wanted = without_absent(experts_recipe(name), model)
    result = quantized(model, wanted, tmp_path / "out", calibrate_all_experts=True)
    assert check_tensors(result) == len(result.errors)
    assert sum(".experts." in module for module in result.errors) == 2 * 4 * 3


# The frozen model, against the arithmetic of compressed-tensors done by hand.


@pytest.mark.parametrize(
    ("name", "family"),
    in_turns(
        ["W4A16", "W4A16_ASYM", "W8A8", "W8A8 static asym", "FP8", "FP8_BLOCK", "NVFP4"],
        ["llama", "qwen2"],
    ),
)
def test_the_frozen_forward_is_fake_quantization(family: str, name: str) -> None:
    model = build(family)
    original = copy.deepcopy(model)
    result = calipers.oneshot(model, RECIPES[name], token_ids(), progress=False)
    x = torch.randn(2, 5, 128)
    for module_name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"):
        frozen, before = (m.get_submodule(module_name) for m in (result.model, original))
        weight = fake_quantized(before.weight.detach(), frozen)
        read = quantized_input(x, frozen)
        expected = torch.nn.functional.linear(read, weight, before.bias)
        assert torch.equal(frozen(x), expected)
        assert not torch.equal(expected, before(x))


def quantized_input(x: torch.Tensor, module: Any) -> torch.Tensor:
    args = module.quantization_scheme.input_activations
    if args is None:
        return x
    if args.dynamic is False:
        return fake_quantize(x, module.input_scale, module.input_zero_point, args)
    global_scale = getattr(module, "input_global_scale", None)
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, module, global_scale)
    return fake_quantize(x, scale, zero_point, args, global_scale=global_scale)


def fake_quantized(weight: torch.Tensor, module: Any) -> torch.Tensor:
    """What a frozen module computes with."""
    return fake_quantize(
        weight,
        module.weight_scale,
        getattr(module, "weight_zero_point", None),
        module.quantization_scheme.weights,
        global_scale=getattr(module, "weight_global_scale", None),
    )


def check_tensors(result: OneshotResult) -> int:
    """Decode the stored weights without any client: they are those the frozen model uses."""
    assert result.output_dir is not None
    stored: dict[str, torch.Tensor] = {}
    for file in result.output_dir.glob("*.safetensors"):
        stored |= load_file(file)
    names = stored_module_names(result.model, result.errors)
    for name, prefix in names.items():
        module = result.model.get_submodule(name)
        scheme: QuantizationScheme = module.quantization_scheme
        local = {
            key.removeprefix(f"{prefix}."): tensor
            for key, tensor in stored.items()
            if key.startswith(f"{prefix}.")
        }
        assert local, prefix
        form = infer_module_format(type(module), scheme).value
        decoded = BaseCompressor.get_value_from_registry(form).decompress(local, scheme)["weight"]
        with torch.no_grad():
            used = fake_quantized(module.weight.detach(), module)
        assert torch.equal(decoded.float(), used.to(decoded.dtype).float()), name
        assert not torch.equal(used, module.weight), name
    return len(names)
