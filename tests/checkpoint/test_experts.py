"""Experts are stored under the names of the original layout, each on its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from frozen import freeze, logits_of, mixtral, qwen2_moe, scheme, unfuse
from pairwise import in_turns
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
)
from transformers.core_model_loading import Transpose, WeightConverter, WeightRenaming

from calipers import oneshot
from calipers.checkpoint.writer import write_checkpoint
from calipers.errors import CalipersWarning

MODELS = {"mixtral": mixtral, "qwen2_moe": qwen2_moe}
# What each projection of an expert is called in checkpoints of the original models.
ORIGINAL = {
    "mixtral": ("block_sparse_moe", {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}),
    "qwen2_moe": ("mlp", {}),
}
LOADABLE = ["W4A16", "W2A16", "W3A16", "W8A16", "MXFP4A16"]
WEIGHT_ONLY_LOADABLE = ["FP8", "FP8_DYNAMIC"]
NOT_LOADABLE = ["W4A16_ASYM", "W8A8", "W8A8_STATIC", "MXFP8"]
Make = Callable[..., PreTrainedModel]


def frozen(make: Make, name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return freeze(unfuse(make(dtype)), scheme(name), ignore=("lm_head", "re:.*_gate$"))


@pytest.fixture(params=sorted(MODELS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def kinds_in_turns(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "kind"), in_turns(names, [*MODELS]))


def stored_name(kind: str, module: str) -> str:
    block, parts = ORIGINAL[kind]
    path, _, part = module.replace(".mlp.", f".{block}.").rpartition(".")
    return f"{path}.{parts.get(part, part)}" if ".experts." in module else module


@pytest.mark.filterwarnings("ignore:transformers:calipers.errors.CalipersWarning")
@kinds_in_turns(*LOADABLE, *WEIGHT_ONLY_LOADABLE, *NOT_LOADABLE, "FP8_BLOCK", "NVFP4", "NVFP4A16")
def test_every_expert_is_stored_under_its_original_name(
    kind: str, name: str, tmp_path: Path
) -> None:
    model = frozen(MODELS[kind], name)
    path = write_checkpoint(model, tmp_path / "out", recipe="")
    tensors = load_file(path / "model.safetensors")
    groups = json.loads((path / "config.json").read_text())["quantization_config"]["config_groups"]
    compressor = BaseCompressor.get_value_from_registry(groups["group_0"]["format"])
    seen = 0
    for module_name, module in model.named_modules():
        if not hasattr(module, "quantization_scheme"):
            continue
        prefix = stored_name(kind, module_name) + "."
        stored = {
            key.removeprefix(prefix): tensor
            for key, tensor in tensors.items()
            if key.startswith(prefix)
        }
        decoded = compressor.decompress(stored, module.quantization_scheme)["weight"]
        args = module.quantization_scheme.weights
        assert torch.equal(decoded, forward_quantize(module, module.weight, "weight", args))
        seen += ".experts." in module_name
    assert seen == 2 * 4 * 3
    assert not [key for key in tensors if "gate_up_proj" in key]


@kinds_in_turns(*LOADABLE)
def test_transformers_loads_them(kind: str, name: str, tmp_path: Path) -> None:
    model = frozen(MODELS[kind], name)
    check_loads(model, write_checkpoint(model, tmp_path / "out", recipe=""))


def check_loads(model: PreTrainedModel, path: Path) -> None:
    loaded, found = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    before, after = logits_of(model), logits_of(loaded)
    assert (after - before).abs().max() <= 2**-7 * before.abs().max()


def test_transformers_loads_them_beside_another_scheme(kind: str, tmp_path: Path) -> None:
    model = freeze(
        unfuse(MODELS[kind](torch.bfloat16)),
        scheme("FP8_DYNAMIC", ("re:.*self_attn.*",)),
        scheme("W4A16", ("re:.*mlp.*_proj$",)),
    )
    path = write_checkpoint(model, tmp_path / "out", recipe="")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    targets = {key: group["targets"] for key, group in config["config_groups"].items()}
    assert targets == {
        "group_0": ["re:.*self_attn.*"],
        "group_1": ["re:.*mlp.*_proj$", r"re:.*\.experts\..*"],
    }
    check_loads(model, path)


@kinds_in_turns("W4A16", "W3A16")
def test_transformers_loads_them_in_float32(kind: str, name: str, tmp_path: Path) -> None:
    model = frozen(MODELS[kind], name, torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(
        write_checkpoint(model, tmp_path / "out", recipe="")
    )
    before = logits_of(model)
    assert (logits_of(loaded) - before).abs().max() <= 1e-5 * before.abs().max()


@kinds_in_turns(*WEIGHT_ONLY_LOADABLE)
def test_fp8_experts_are_loaded_as_bfloat16(kind: str, name: str, tmp_path: Path) -> None:
    """The inputs of fused experts are not quantized; their weights are those that were stored."""
    model = frozen(MODELS[kind], name)
    with pytest.warns(CalipersWarning, match="does not quantize what goes into experts"):
        path = write_checkpoint(model, tmp_path / "out", recipe="")
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for i, layer in enumerate(model.model.layers):
        down = loaded.model.layers[i].mlp.experts.down_proj
        for expert, weight in zip(layer.mlp.experts.children(), down, strict=True):
            module = expert.down_proj
            args = module.quantization_scheme.weights
            wanted = forward_quantize(module, module.weight, "weight", args)
            assert torch.allclose(weight, wanted, rtol=2**-7)


@kinds_in_turns(*NOT_LOADABLE)
def test_what_transformers_cannot_load_is_said(kind: str, name: str, tmp_path: Path) -> None:
    model = frozen(MODELS[kind], name)
    with pytest.warns(CalipersWarning, match=r"transformers cannot load experts .*complete"):
        path = write_checkpoint(model, tmp_path / "out", recipe="")
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        AutoModelForCausalLM.from_pretrained(path)


@kinds_in_turns("NVFP4", "NVFP4A16")
def test_nvfp4_experts_are_loaded_wrongly(kind: str, name: str, tmp_path: Path) -> None:
    model = frozen(MODELS[kind], name)
    with pytest.warns(CalipersWarning, match="transformers loads NVFP4 experts without their glob"):
        path = write_checkpoint(model, tmp_path / "out", recipe="")
    _, found = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert any(key.endswith("weight_global_scale") for key in found["unexpected_keys"])


def test_fused_experts_are_written_as_save_pretrained_does(kind: str, tmp_path: Path) -> None:
    model = freeze(MODELS[kind](torch.bfloat16), scheme("W4A16", ("re:.*self_attn.*",)))
    MODELS[kind](torch.bfloat16).save_pretrained(tmp_path / "plain")
    path = write_checkpoint(model, tmp_path / "out", recipe="")
    ours = load_file(path / "model.safetensors")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    experts = [name for name in plain if ".experts." in name]
    assert experts
    assert all(torch.equal(ours[name], plain[name]) for name in experts)
    assert {name for name in ours if "self_attn" not in name} == {
        name for name in plain if "self_attn" not in name
    }


def test_a_loaded_model_keeps_the_names_it_was_loaded_with(kind: str, tmp_path: Path) -> None:
    MODELS[kind](torch.bfloat16).save_pretrained(tmp_path / "plain")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    model = freeze(unfuse(loaded), scheme("W4A16"), ignore=("lm_head", "re:.*_gate$"))
    path = write_checkpoint(model, tmp_path / "out", recipe="")
    assert {name.rpartition(".")[0] for name in load_file(path / "model.safetensors")} == {
        name.rpartition(".")[0] for name in load_file(tmp_path / "plain" / "model.safetensors")
    }
    check_loads(model, path)


def test_experts_that_checkpoints_hold_fused_keep_their_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = "mlp.experts.down_proj"
    turned = WeightConverter(part, part, operations=[Transpose(1, 2, check_dims=True)])
    renamed = WeightRenaming("model.layers", "blocks")
    monkeypatch.setattr(
        "calipers.checkpoint.state.get_model_conversion_mapping",
        lambda *_, **__: [renamed.reverse_transform(), turned],
    )
    with pytest.warns(CalipersWarning, match="transformers has no place for single experts of"):
        path = write_checkpoint(frozen(qwen2_moe, "W4A16"), tmp_path / "out", recipe="")
    names = set(load_file(path / "model.safetensors"))
    assert "blocks.1.mlp.experts.3.down_proj.weight_packed" in names
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    assert {"model.layers.0.mlp.shared_expert_gate", "blocks.0.mlp.shared_expert_gate"} <= set(
        config["ignore"]
    )


def test_experts_without_a_gate_are_found_again(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 128, "n_groups": 1}
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 8, "chunk_size": 16}
    moe = {"n_routed_experts": 4, "moe_intermediate_size": 64, "num_experts_per_tok": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = NemotronHConfig(**sizes, **mamba, **moe, **heads)
    torch.manual_seed(0)
    model = NemotronHForCausalLM(config).eval()
    options = {"weights": {"num_bits": 8, "strategy": "channel"}, "ignore": ["lm_head"]}
    recipe = {"modifiers": {"QuantizationModifier": options}}
    path = oneshot(model, recipe, output_dir=tmp_path / "out", progress=False).output_dir
    loaded, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    stored = {name for name in load_file(path / "model.safetensors") if ".experts." in name}
    assert "backbone.layers.1.mixer.experts.3.up_proj.weight_packed" in stored
    assert all(name.startswith("backbone.layers.") for name in stored)
    torch.testing.assert_close(logits_of(loaded), logits_of(model), rtol=1e-4, atol=1e-5)
    dynamic = {"modifiers": {"QuantizationModifier": {"scheme": "INT8", "ignore": ["lm_head"]}}}
    with pytest.warns(CalipersWarning, match=r"transformers cannot load experts .*complete"):
        oneshot(NemotronHForCausalLM(config), dynamic, output_dir=tmp_path / "8", progress=False)
