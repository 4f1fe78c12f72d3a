"""What quantizing from disk to disk refuses, and models that transformers does not know."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizing import (
    HEAD_CACHE,
    IDS,
    WITH_OUTPUTS,
    bytes_of,
    measured,
    model_folder,
    modifier,
    quantize,
)
from safetensors.torch import save_file

import calipers
from calipers import Measurements
from calipers.checkpoint.headers import stored_tensors
from calipers.errors import (
    CheckpointExistsError,
    ConfigurationError,
    MeasurementsError,
    ModelLoadError,
    RecipeError,
    TensorValueError,
)
from calipers.files.safetensors_header import read_header

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def seen(llama: Path) -> Measurements:
    return measured(llama)


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("recipe", "told"),
        [
            (modifier("W8A8_STATIC", observer={"input": "minmax"}), "observer minmax keeps"),
            (modifier("FP8_DYNAMIC", kv_cache_scheme=HEAD_CACHE), "--collect attention"),
            (modifier("W4A16", gptq=True), "--collect hessian"),
            (modifier("W4A16", gptq=True, error_propagation="both"), "error_propagation: float"),
            (WITH_OUTPUTS, "--collect outputs"),
        ],
    )
    def test_what_the_measurements_do_not_tell(
        self, llama: Path, tmp_path: Path, recipe: Any, told: str
    ) -> None:
        plain = calipers.measure(llama, IDS[:2], progress=False)
        with pytest.raises(ConfigurationError, match=told) as error:
            quantize(llama, recipe, tmp_path / "out", measurements=plain)
        assert "model.layers.0.self_attn" in str(error.value)
        assert not (tmp_path / "out").exists()

    def test_a_recipe_that_needs_data_without_any(self, llama: Path, tmp_path: Path) -> None:
        told = "needs data for 14 tensors .the first is model.layers.0.self_attn.q_proj.input"
        with pytest.raises(ConfigurationError, match=told):
            quantize(llama, modifier("FP8"), tmp_path / "out")

    def test_measurements_of_other_weights(self, seen: Measurements, tmp_path: Path) -> None:
        other = model_folder(tmp_path / "other", num_hidden_layers=1)
        with pytest.raises(MeasurementsError, match=r"are of another model, or of other weights"):
            quantize(other, modifier("FP8"), tmp_path / "out", measurements=seen)

    def test_an_unfinished_run(self, llama: Path, seen: Measurements, tmp_path: Path) -> None:
        assert seen.info is not None
        half = Measurements.of_tensors(replace(seen.info, run={"batches": 1}), seen.tensors())
        with pytest.raises(MeasurementsError, match="not those of a finished run"):
            quantize(llama, modifier("FP8"), tmp_path / "out", measurements=half)

    def test_several_processes(
        self, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigurationError, match="one process, and this is one of 2"):
            quantize(llama, "FP8_DYNAMIC", tmp_path / "out")

    def test_no_output_and_one_that_is_there(self, llama: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="no place for the checkpoint"):
            calipers.quantize(llama, "FP8_DYNAMIC")
        (tmp_path / "out").mkdir()
        with pytest.raises(CheckpointExistsError, match="exists already"):
            quantize(llama, modifier("FP8_DYNAMIC"), tmp_path / "out")
        with pytest.raises(CheckpointExistsError, match="model"):
            quantize(llama, modifier("FP8_DYNAMIC"), llama, overwrite=True)
        (tmp_path / "link").symlink_to(llama)
        for source, out in (
            (llama, tmp_path / "link" / "a" / "b"),
            (tmp_path / "link", llama / "a"),
        ):
            with pytest.raises(CheckpointExistsError, match="inside that of the model in use"):
                quantize(source, modifier("FP8_DYNAMIC"), out)
        assert not (llama / "a").exists()

    def test_a_file_that_becomes_shorter_meanwhile(self, llama: Path, tmp_path: Path) -> None:
        shutil.copytree(llama, tmp_path / "model")
        stored = stored_tensors(tmp_path / "model")["model.layers.1.mlp.up_proj.weight"]
        stored.file.write_bytes(stored.file.read_bytes()[: stored.begin + 10])
        for take in (stored.read, stored.map):
            with pytest.raises(ModelLoadError, match="has become shorter"):
                take()

    def test_mapped_tensors(self, tmp_path: Path) -> None:
        """They are those of the file, wherever they begin there, and writing stays in memory."""
        values = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.randn(5, 7).bfloat16()}
        values |= {"none": torch.empty(0, 4), "long": torch.randn(3, 1000), "one": torch.ones(())}
        save_file(values, tmp_path / "plain.safetensors")
        content = (tmp_path / "plain.safetensors").read_bytes()
        odd = len(content[8:].split(b"}}")[0]) + 2 + 1  # a header that ends at an odd place
        text = content[8 : 8 + int.from_bytes(content[:8], "little")].rstrip().ljust(odd | 1)
        data = content[8 + int.from_bytes(content[:8], "little") :]
        shifted = len(text).to_bytes(8, "little") + text + data
        (tmp_path / "odd.safetensors").write_bytes(shifted)
        for file, before in (("plain.safetensors", content), ("odd.safetensors", shifted)):
            for name, stored in read_header(tmp_path / file).items():
                found = stored.map()
                assert found.dtype == values[name].dtype
                assert torch.equal(found, values[name])
                found.zero_()
            assert (tmp_path / file).read_bytes() == before

    def test_a_weight_with_nan_leaves_nothing(self, llama: Path, tmp_path: Path) -> None:
        shutil.copytree(llama, tmp_path / "model")
        file = tmp_path / "model" / "model.safetensors"
        stored = stored_tensors(tmp_path / "model")["model.layers.1.mlp.up_proj.weight"]
        content = bytearray(file.read_bytes())
        content[stored.begin : stored.begin + 2] = b"\xff\xff"
        file.write_bytes(content)
        with pytest.raises(TensorValueError, match=r"model\.layers\.1\.mlp\.up_proj"):
            quantize(tmp_path / "model", modifier("W4A16"), tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def _make_unknown(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "strange", "architectures": ["StrangeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


class TestUnknownArchitecture:
    PATTERN = "re:.*_proj$"

    @pytest.fixture
    def unknown(self, llama: Path, tmp_path: Path) -> Path:
        folder = tmp_path / "unknown"
        shutil.copytree(llama, folder)
        _make_unknown(folder)
        return folder

    def test_biases_stay_what_they_are(self, tmp_path: Path) -> None:
        known = model_folder(tmp_path / "known", "qwen2", tie_word_embeddings=False)
        shutil.copytree(known, tmp_path / "unknown")
        _make_unknown(tmp_path / "unknown")
        recipe = calipers.QuantizationModifier(targets=self.PATTERN, scheme="FP8_DYNAMIC")
        quantize(known, recipe, tmp_path / "a")
        quantize(tmp_path / "unknown", recipe, tmp_path / "b")
        assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
        assert "model.layers.0.self_attn.q_proj.bias" in bytes_of(tmp_path / "b")

    def test_is_quantized_by_names(self, llama: Path, unknown: Path, tmp_path: Path) -> None:
        recipe = calipers.QuantizationModifier(targets=self.PATTERN, scheme="NVFP4A16")
        quantize(unknown, recipe, tmp_path / "a")
        quantize(llama, recipe, tmp_path / "b")
        assert bytes_of(tmp_path / "a") == bytes_of(tmp_path / "b")
        found, source = (
            json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "a", unknown)
        )
        assert found.pop("quantization_config")["config_groups"]["group_0"]["targets"] == [
            self.PATTERN
        ]
        assert found == source

    def test_classes_mean_nothing(self, unknown: Path, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"'strange', so it cannot be told .* 'Linear'"):
            quantize(unknown, "W4A16", tmp_path / "out")
