"""What stands in the folder beside the quantized tensors, and what the model keeps."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.offload import disable_onloading, offload_module
from compressed_tensors.quantization import QuantizationStatus
from frozen import freeze, llama, logits_of, qwen2, scheme, tokenizer
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from calipers import oneshot
from calipers.checkpoint.compression import estimated_size, tensor_names
from calipers.checkpoint.config import checkpoint_config
from calipers.checkpoint.writer import write_checkpoint
from calipers.errors import CalipersWarning, CheckpointError, ConfigurationError


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


def state(model: PreTrainedModel) -> dict[str, object]:
    """Everything that a compressor could change."""
    found: dict[str, object] = {name: t.clone() for name, t in model.state_dict().items()}
    for name, module in model.named_modules():
        found[f"{name}/scheme"] = copy.deepcopy(getattr(module, "quantization_scheme", None))
        found[f"{name}/status"] = getattr(module, "quantization_status", None)
        found[f"{name}/keys"] = sorted(vars(module))
        found[f"{name}/hooks"] = len(module._forward_pre_hooks)
    found["config"] = model.config.to_dict()
    return found


@pytest.mark.parametrize("name", ["W4A16_ASYM", "FP8"])
def test_the_model_is_not_changed(name: str, tmp_path: Path) -> None:
    model = freeze(llama(), scheme(name))
    before = state(model)
    write_checkpoint(model, tmp_path / "out", recipe="")
    after = state(model)
    assert before.keys() == after.keys()
    for key, value in before.items():
        same = torch.equal(value, after[key]) if torch.is_tensor(value) else value == after[key]
        assert same, key
    assert any(isinstance(value, QuantizationStatus) for value in before.values())


def test_one_shard(tmp_path: Path) -> None:
    path = write_checkpoint(freeze(llama(), scheme("W4A16")), tmp_path / "out", recipe="")
    assert path == (tmp_path / "out").resolve()
    assert [file.name for file in path.glob("model*")] == ["model.safetensors"]
    with safe_open(path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_many_shards(tmp_path: Path) -> None:
    model = freeze(llama(), scheme("W4A16"))
    whole = tensors_of(write_checkpoint(model, tmp_path / "whole", recipe=""))
    path = write_checkpoint(model, tmp_path / "out", recipe="", max_shard_size="50KB")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    parts = {file: load_file(path / file) for file in files}
    assert index["weight_map"] == {name: file for file in files for name in parts[file]}
    assert {name: t.shape for part in parts.values() for name, t in part.items()} == {
        name: tensor.shape for name, tensor in whole.items()
    }
    sizes = {file: sum(t.nbytes for t in part.values()) for file, part in parts.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 50_000 or len(parts[file]) == 1 for file, size in sizes.items())
    assert torch.equal(
        logits_of(AutoModelForCausalLM.from_pretrained(path)),
        logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "whole")),
    )


@pytest.mark.parametrize("size", ["huge", "5XB", "-1", 0, "1.2.3GB"])
def test_a_shard_size_that_is_none(size: str | int, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"max_shard_size=.* is no size\. Give bytes"):
        write_checkpoint(llama(), tmp_path / "out", recipe="", max_shard_size=size)


@pytest.mark.parametrize("name", ["W4A16", "FP8_DYNAMIC", "W8A8"])
def test_the_size_is_estimated_well(name: str, tmp_path: Path) -> None:
    model = freeze(llama(torch.bfloat16), scheme(name))
    path = write_checkpoint(model, tmp_path / "out", recipe="")
    written = (path / "model.safetensors").stat().st_size
    assert 0.85 * written <= estimated_size(model, tensor_names(model)) <= 1.05 * written


def test_recipe_notes_and_generation_config(tmp_path: Path) -> None:
    model = freeze(llama(), scheme("W4A16"))
    model.generation_config.temperature = 0.5  # without sampling: save_pretrained refuses it
    model.generation_config.do_sample = False
    recipe = "quantization_stage:\n  # größer\n  quantization_modifiers: {}"
    notes = {"coverage": {"unseen": ["a"]}, "on_unseen": "peers"}
    path = write_checkpoint(model, tmp_path / "out", recipe=recipe, notes=notes)
    assert (path / "recipe.yaml").read_text(encoding="utf-8").rstrip("\n") == recipe
    files = ["generation_config.json", "recipe.yaml"]
    ours = {"calipers": "0.1.0", "files": files, **notes}
    assert json.loads((path / "calipers.json").read_text()) == ours
    assert json.loads((path / "generation_config.json").read_text())["temperature"] == 0.5


def test_notes_that_are_not_json_leave_nothing(tmp_path: Path) -> None:
    model = freeze(llama(), scheme("W4A16"))
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_checkpoint(model, tmp_path / "out", recipe="", notes={"a": object()})
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_given_is_saved(tmp_path: Path) -> None:
    model = freeze(llama(), scheme("W4A16"))
    path = write_checkpoint(model, tmp_path / "out", recipe="", tokenizer=tokenizer())
    check_tokenizer(path)


def check_tokenizer(path: Path) -> None:
    loaded = PreTrainedTokenizerFast.from_pretrained(path)
    assert loaded("w3 w5 x")["input_ids"] == [3, 5, 127]
    messages = [{"role": "user", "content": "w7"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == "w7"


def test_what_stands_beside_the_source_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    qwen2(tie_word_embeddings=True).save_pretrained(source)
    tokenizer().save_pretrained(source)
    (source / "modeling_own.py").write_text("answer = 42")
    (source / "notes.txt").write_text("not ours")
    original = json.loads((source / "config.json").read_text())
    del original["tie_word_embeddings"]
    original |= {"something_new": [1], "torch_dtype": "float16"}
    del original["dtype"]
    (source / "config.json").write_text(json.dumps(original))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    freeze(model, scheme("W4A16"))
    path = write_checkpoint(model, tmp_path / "plain", recipe="")
    check_tokenizer(path)
    config = json.loads((path / "config.json").read_text())
    assert config["something_new"] == [1]
    assert config["torch_dtype"] == "float32"
    assert "dtype" not in config
    assert config["tie_word_embeddings"] is True
    assert not (path / "modeling_own.py").exists()
    assert not (path / "notes.txt").exists()
    model.config.auto_map = {"AutoModel": "modeling_own.Own"}
    path = write_checkpoint(model, tmp_path / "code", recipe="")
    assert (path / "modeling_own.py").read_text() == "answer = 42"


def test_a_quantized_head_is_not_called_tied(tmp_path: Path) -> None:
    qwen2(tie_word_embeddings=True).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert checkpoint_config(model)["tie_word_embeddings"] is True
    freeze(model, scheme("W8A16"), ignore=())
    assert model.config.tie_word_embeddings is True
    assert checkpoint_config(model)["tie_word_embeddings"] is False


def test_a_config_that_was_changed_after_loading_is_what_is_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    llama().save_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    model.config.rms_norm_eps = 0.5
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5
    freeze(model, scheme("W8A16"))
    path = write_checkpoint(model, tmp_path / "out", recipe="")
    config = json.loads((path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["rms_norm_eps"]) == (1, 0.5)
    assert config["architectures"] == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(path)
    torch.testing.assert_close(logits_of(loaded), logits_of(model))


def test_a_packed_embedding_is_written_with_a_warning(tmp_path: Path) -> None:
    model = llama()
    expected = (
        r"^transformers cannot load an Embedding in the format pack-quantized \(here "
        r"'model.embed_tokens'\). The tensors are complete, for clients that read them.$"
    )
    recipe = {"modifiers": {"QuantizationModifier": {"targets": "Embedding", "scheme": "W8A16"}}}
    with pytest.warns(CalipersWarning, match=expected):
        path = oneshot(model, recipe, output_dir=tmp_path / "out", progress=False).output_dir
    with pytest.raises(AttributeError):  # when this works, the warning is to go
        AutoModelForCausalLM.from_pretrained(path)


def test_a_name_that_is_no_folder_is_no_problem(tmp_path: Path) -> None:
    model = freeze(llama(), scheme("W4A16"))
    for name in ("nobody/nothing", "not a/name/at all"):
        model.config._name_or_path = name
        path = write_checkpoint(model, tmp_path / "out", recipe="", overwrite=True)
        assert json.loads((path / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_modules(place: str, tmp_path: Path) -> None:
    wanted = tensors_of(
        write_checkpoint(freeze(qwen2(), scheme("W4A16_ASYM")), tmp_path / "plain", recipe="")
    )
    model = freeze(qwen2(), scheme("W4A16_ASYM"))
    options = {"offload_dir": str(tmp_path / "swap")} if place == "disk" else {}
    (tmp_path / "swap").mkdir()
    for module in model.modules():
        offload_module(module, "cpu", place, **options)
    with disable_onloading():
        device = model.lm_head.weight.device.type
    assert device == ("meta" if place == "disk" else "cpu")
    found = tensors_of(write_checkpoint(model, tmp_path / "out", recipe=""))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_offloaded_tied_embeddings_are_stored_once(place: str, tmp_path: Path) -> None:
    model = freeze(qwen2(tie_word_embeddings=True), scheme("W4A16"))
    options = {"offload_dir": str(tmp_path / "swap")} if place == "disk" else {}
    (tmp_path / "swap").mkdir()
    for module in (model.lm_head, model.model.embed_tokens):
        offload_module(module, "cpu", place, **options)
    path = write_checkpoint(model, tmp_path / "out", recipe="")
    assert "lm_head.weight" not in tensors_of(path)
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_subclass_of_linear_is_stored_as_a_linear(tmp_path: Path) -> None:
    class Own(torch.nn.Linear):
        pass

    model = freeze(llama(), scheme("W4A16"))
    model.model.layers[0].mlp.up_proj.__class__ = Own
    path = write_checkpoint(model, tmp_path / "out", recipe="")
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors_of(path)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert torch.allclose(logits_of(loaded), logits_of(model), atol=1e-5)


@pytest.mark.parametrize("name", ["W4A16_ASYM", "FP8"])
def test_a_loaded_checkpoint_can_be_written_again(name: str, tmp_path: Path) -> None:
    first = write_checkpoint(freeze(llama(), scheme(name)), tmp_path / "first", recipe="")
    second = write_checkpoint(
        AutoModelForCausalLM.from_pretrained(first), tmp_path / "second", recipe=""
    )
    wanted, found = tensors_of(first), tensors_of(second)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    assert (first / "config.json").read_text() == (second / "config.json").read_text()


def test_an_unquantized_model_can_be_written(tmp_path: Path) -> None:
    model = llama()
    path = write_checkpoint(model, tmp_path / "out", recipe="")
    assert "quantization_config" not in json.loads((path / "config.json").read_text())
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(path)), logits_of(model))


@pytest.mark.parametrize("status", [QuantizationStatus.CALIBRATION, None])
def test_a_model_that_is_not_frozen_is_refused(
    status: QuantizationStatus | None, tmp_path: Path
) -> None:
    model = freeze(llama(), scheme("W4A16"))
    model.model.layers[1].mlp.up_proj.quantization_status = status
    said = "'calibration'" if status else "missing"
    with pytest.raises(CheckpointError, match=rf"'model.layers.1.mlp.up_proj' .* status is {said}"):
        write_checkpoint(model, tmp_path / "out", recipe="")
    assert list(tmp_path.iterdir()) == []


def test_quantized_tensors_are_not_converted(tmp_path: Path) -> None:
    from transformers.core_model_loading import Chunk, WeightConverter

    model = freeze(llama(), scheme("W4A16"))
    halves = ["mlp.first.weight", "mlp.second.weight"]
    model._weight_conversions = [
        WeightConverter(halves, "mlp.up_proj.weight", operations=[Chunk(dim=0)])
    ]
    with pytest.raises(CheckpointError, match=r"layers.\d.mlp.up_proj.weight' is quantized, but"):
        write_checkpoint(model, tmp_path / "out", recipe="")
