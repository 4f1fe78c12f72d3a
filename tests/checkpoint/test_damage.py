"""Files of a model that are damaged, incomplete or of another model: named, never replaced."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, saved
from safetensors.torch import load_file, save_file

import calipers
from calipers import errors
from calipers.checkpoint.reader import load_model, load_skeleton, load_tokenizer

Tensors = dict[str, torch.Tensor]
Load = Callable[[Path], Any]
CPU = torch.device("cpu")
WAYS: dict[str, Load] = {
    "in memory": load_model,
    "on disk": lambda folder: load_model(folder, on_disk_for=CPU),
    "skeleton": load_skeleton,
}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(params=WAYS)
def load(request: pytest.FixtureRequest) -> Load:
    return WAYS[request.param]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    return {
        family: saved(build(family, **sizes), place / family)
        for family in ("llama", "llama tied", "mixtral")
    }


@pytest.fixture
def folder(models: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Copy a model, so that it can be damaged."""

    def copied(family: str = "llama") -> Path:
        made = tmp_path / "model"
        made.mkdir()
        for file in models[family].iterdir():
            (made / file.name).write_bytes(file.read_bytes())
        return made

    return copied


def with_tensors(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def with_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def refused(load: Load, folder: Path, text: str, kind: type = errors.ModelLoadError) -> Any:
    with pytest.raises(kind, match=re.escape(text)) as caught:
        load(folder)
    assert caught.value.exit_code == 2
    return caught.value


class TestWeightsThatAreNotThere:
    def test_a_tensor_that_was_lost(self, load: Load, folder: Callable[..., Path]) -> None:
        damaged = with_tensors(folder(), lambda tensors: tensors.pop(UP))
        text = (
            f"The weights of '{damaged}' are not those of the LlamaForCausalLM that its "
            f"config.json describes: 1 tensor missing ({UP}). Nothing was put in their place."
        )
        refused(load, damaged, text)

    def test_a_tensor_under_another_name(self, load: Load, folder: Callable[..., Path]) -> None:
        wrong = UP.replace("up", "uq")
        damaged = with_tensors(folder(), lambda t: t.update({wrong: t.pop(UP)}))
        text = f"1 tensor missing ({UP}); 1 tensor unknown to the model ({wrong})"
        refused(load, damaged, text)

    def test_a_tensor_of_another_shape(self, load: Load, folder: Callable[..., Path]) -> None:
        damaged = with_tensors(folder(), lambda t: t.update({UP: t[UP][:-1].contiguous()}))
        refused(load, damaged, f"1 tensor different ({UP} is (31, 32), not (32, 32))")

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int8])
    def test_a_tensor_of_another_kind(
        self, dtype: torch.dtype, load: Load, folder: Callable[..., Path]
    ) -> None:
        damaged = with_tensors(folder(), lambda t: t.update({UP: t[UP].to(dtype)}))
        refused(load, damaged, f"1 tensor different ({UP} is {dtype}, not torch.float32)")

    def test_two_kinds_of_sixteen_bits(self, folder: Callable[..., Path]) -> None:
        def halve(tensors: Tensors) -> None:
            tensors.update({name: t.to(torch.bfloat16) for name, t in tensors.items()})
            tensors[UP] = tensors[UP].view(torch.float16)

        damaged = with_config(with_tensors(folder(), halve), dtype="bfloat16")
        refused(load_model, damaged, f"({UP} is torch.float16, not torch.bfloat16)")

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"num_hidden_layers": 3}, "9 tensors missing (model.layers.2."),
            ({"num_hidden_layers": 1}, "9 tensors unknown to the model (model.layers.1."),
            ({"attention_bias": True}, "8 tensors missing (model.layers.0.self_attn.k_proj.bias, "),
            ({"model_type": "qwen2"}, "missing (model.layers.0.self_attn.k_proj.bias, "),
            ({"hidden_size": 10**12}, "is (260, 32), not (260, 1000000000000)"),
        ],
    )
    def test_a_config_of_another_model(
        self, changes: dict[str, Any], text: str, load: Load, folder: Callable[..., Path]
    ) -> None:
        refused(load, with_config(folder(), **changes), text)

    def test_experts_are_counted(self, load: Load, folder: Callable[..., Path]) -> None:
        """transformers takes the experts it finds in their order, whatever their numbers are."""

        def renumber(tensors: Tensors) -> None:
            for name in [name for name in tensors if "layers.1" in name and "experts.0." in name]:
                tensors[name.replace("experts.0.", "experts.4.")] = tensors.pop(name)

        damaged = with_tensors(folder("mixtral"), renumber)
        refused(load, damaged, "3 tensors missing (model.layers.1.block_sparse_moe.experts.0.w1.")

    def test_half_an_expert(self, load: Load, folder: Callable[..., Path]) -> None:
        name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
        damaged = with_tensors(folder("mixtral"), lambda tensors: tensors.pop(name))
        refused(load, damaged, f"1 tensor missing ({name})")

    def test_a_quantized_checkpoint_without_a_scale(self, models: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        calipers.oneshot(models["llama"], "FP8_DYNAMIC", output_dir=out, progress=False)
        scale = "model.layers.0.mlp.up_proj.weight_scale"
        with_tensors(out, lambda tensors: tensors.pop(scale))
        refused(lambda path: load_model(path, quantized=True), out, f"1 tensor missing ({scale})")


def test_what_the_architecture_ties_or_ignores_may_differ(folder: Callable[..., Path]) -> None:
    """A tied output layer is in no file, and old files have frequencies that nobody reads."""
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    made = with_tensors(folder("llama tied"), lambda t: t.update({old: torch.ones(8)}))
    assert "lm_head.weight" not in load_file(made / "model.safetensors")
    for load in WAYS.values():
        load(made)


class TestDamagedFiles:
    def test_a_file_that_was_cut_off(self, load: Load, folder: Callable[..., Path]) -> None:
        file = folder() / "model.safetensors"
        content = file.read_bytes()
        header = 8 + struct.unpack("<Q", content[:8])[0]
        for length in (0, 5, 100, header, len(content) - 1):
            file.write_bytes(content[:length])
            text = f"The file '{file}' is damaged or incomplete: "
            told = refused(load, file.parent, text, errors.ModelLoadError)
            assert "(an interrupted download?). Correct it, or copy or download" in str(told)

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda index: index.pop("metadata"), "'metadata' must be an object, got None"),
            (lambda index: index.update(weight_map=None), "'weight_map' must be an object"),
            (lambda index: index.update(weight_map={}), "its weight_map is empty"),
            (
                lambda index: index["weight_map"].update({UP: "../model/other.safetensors"}),
                "'../model/other.safetensors' is outside of the folder",
            ),
            (
                lambda index: index["weight_map"].update({UP: "/etc/x.safetensors"}),
                "'/etc/x.safetensors' is outside of the folder",
            ),
            (lambda index: index["weight_map"].update({UP: 3}), "names 3, no safetensors file"),
            (
                lambda index: index["weight_map"].update({UP: "lost.safetensors"}),
                "'lost.safetensors' is named by the index and does not exist",
            ),
            (
                lambda index: index["weight_map"].update(x="a.safetensors"),
                "'x' is not in 'a.safetensors'",
            ),
        ],
    )
    def test_an_index(
        self, change: Callable[[Any], Any], text: str, load: Load, folder: Callable[..., Path]
    ) -> None:
        path = folder()
        single = path / "model.safetensors"
        names = list(load_file(single))
        single.rename(path / "a.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, "a.safetensors")}
        file = path / "model.safetensors.index.json"
        file.write_text(json.dumps(index))
        load(path)
        change(index)
        file.write_text(json.dumps(index))
        refused(load, path, text, errors.ModelLoadError)

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (b"", "no valid JSON: Expecting value"),
            (b"[" * 100_000, "it is nested too deeply"),
            (b"[1, 2]", "it holds a list, not a JSON object"),
            (b'{"a": "\\ud800"}', "half a character"),
            (b'{"a": "\xff"}', "no UTF-8 text at byte 7"),
            (b'{"a": 1, "a": 2}', "the key 'a' stands twice"),
            (b'{"num_hidden_layers": 1000000000}', "'num_hidden_layers' is 1e+09, more than any"),
        ],
    )
    def test_a_config(
        self, content: bytes, text: str, load: Load, folder: Callable[..., Path]
    ) -> None:
        file = folder() / "config.json"
        file.write_bytes(content)
        told = refused(load, file.parent, text, errors.ModelLoadError)
        assert str(told).startswith(f"The file '{file}' is damaged or incomplete: ")

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"hidden_size": "x"}, "Field 'hidden_size' expected int, got str (value: 'x')"),
            ({"num_attention_heads": 0}, "ZeroDivisionError: "),
            ({"hidden_act": "nothing"}, "KeyError: 'nothing'"),
            ({"model_type": "unknown"}, "ValueError: The checkpoint you are trying to load"),
        ],
    )
    def test_a_config_that_transformers_cannot_use(
        self, changes: dict[str, Any], text: str, load: Load, folder: Callable[..., Path]
    ) -> None:
        damaged = with_config(folder(), **changes)
        told = refused(load, damaged, text, errors.ModelLoadError)
        assert str(told).startswith(f"The files of '{damaged}' cannot be used (config.json")

    def test_a_config_of_too_many_layers(self, load: Load, folder: Callable[..., Path]) -> None:
        damaged = with_config(folder(), num_hidden_layers=1_000_000)
        text = "it describes a model of more than 1,084 tensors"
        refused(load, damaged, text, errors.ModelLoadError)

    def test_a_tokenizer(self, models: Any, folder: Callable[..., Path]) -> None:
        model = load_skeleton(models["llama"])
        path = folder()
        for content in ("{", "{}", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'):
            (path / "tokenizer.json").write_text(content)
            with pytest.raises(errors.ModelLoadError) as caught:
                load_tokenizer(path, model)
            assert str(path) in str(caught.value)
