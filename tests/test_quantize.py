"""From disk to disk: the checkpoint is that of ``oneshot``, to the bit."""

from __future__ import annotations

import json
import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from quantizing import HEADS, IDS, assert_same_checkpoint, bytes_of, model_folder, modifier
from safetensors.torch import save_file

import calipers
from calipers import Measurements
from calipers.checkpoint.headers import stored_tensors
from calipers.errors import (
    CalipersError,
    CheckpointExistsError,
    ConfigurationError,
    MeasurementsError,
    ModelLoadError,
    RecipeError,
    TensorValueError,
)
from calipers.files.safetensors_header import StoredTensor, read_header
from calipers.measurements.stored_fields import OpenFile
from calipers.planning.plan import StepPlan
from calipers.planning.specs import SQUARES, Requirement
from calipers.runtime.progress import Progress
from calipers.statistics.moments import SquareSums
from calipers.steps import Modifier
from calipers.steps.layer import Changes

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

COLLECTED = "hessian,outputs,attention"
HEAD_CACHE = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 32}
WITH_OUTPUTS = calipers.QuantizationModifier(
    targets="Linear",
    ignore=HEADS,
    weights={**GROUP, "observer": "imatrix_mse"},
    output_activations={"num_bits": 8, "strategy": "tensor"},
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def seen(llama: Path) -> Measurements:
    file = llama.with_name("seen")
    calipers.measure(llama, IDS, collect=COLLECTED, output_file=file, progress=False)
    return Measurements.load(file)


def quantize(model: Path, recipe: Any, out: Path, **options: Any) -> calipers.QuantizeResult:
    return calipers.quantize(model, recipe, output_dir=out, progress=False, **options)


def both(model: Path, recipe: Any, tmp: Path, data: Any = None, **options: Any) -> None:
    """Quantize in memory and from disk to disk, and compare."""
    calipers.oneshot(model, recipe, data, output_dir=tmp / "memory", progress=False)
    quantize(model, recipe, tmp / "disk", **options)
    assert_same_checkpoint(tmp / "disk", tmp / "memory")


@pytest.fixture
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("calipers.engine.quantize.load_model", load)


class TestWithoutData:
    @pytest.mark.parametrize(
        ("family", "scheme", "options"),
        [
            ("llama", "W4A16", {"weight_observer": "memoryless_mse"}),
            ("llama tied", "NVFP4A16", {"ignore": []}),  # the head gets a weight of its own
            ("qwen2", "FP8_DYNAMIC", {"dtype": torch.float16}),  # biases
            ("mistral", "MXFP4", {"dtype": torch.float32}),
            ("mixtral", "W8A8", {}),
            ("qwen2-moe", "NVFP4A16", {"ignore": ["re:.*gate$", "re:.*lm_head"]}),
            ("qwen3-moe", "W4A16", {"ignore": ["re:.*experts.*", "re:.*gate$", *HEADS]}),
        ],
    )
    @pytest.mark.usefixtures("never_loaded")
    def test_the_checkpoint_is_that_of_oneshot(
        self, tmp_path: Path, family: str, scheme: str, options: dict[str, Any]
    ) -> None:
        model = model_folder(tmp_path / "model", family, **_dtype(options))
        both(model, modifier(scheme, **options), tmp_path)

    def test_shards_are_those_of_oneshot(self, llama: Path, tmp_path: Path) -> None:
        recipe = modifier("FP8_DYNAMIC")
        options: dict[str, Any] = {"max_shard_size": "100KB", "progress": False}
        calipers.oneshot(llama, recipe, output_dir=tmp_path / "memory", **options)
        quantize(llama, recipe, tmp_path / "disk", max_shard_size="100KB")
        files = [sorted(p.name for p in (tmp_path / n).iterdir()) for n in ("memory", "disk")]
        assert files[0] == files[1]
        assert sum(name.startswith("model-") for name in files[0]) > 3
        for name in files[0]:
            if name != "calipers.json":
                one, other = ((tmp_path / n / name).read_bytes() for n in ("memory", "disk"))
                assert one == other, name

    def test_tensors_of_another_dtype_become_those_of_the_model(
        self, llama: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(llama, tmp_path / "model")
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        config["dtype"] = "float32"
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
        both(tmp_path / "model", modifier("W4A16"), tmp_path)

    def test_a_model_whose_files_hold_experts_otherwise_is_loaded(self, tmp_path: Path) -> None:
        model = build("mixtral", torch.bfloat16)
        model.save_pretrained(tmp_path / "model", save_original_format=False)
        assert "model.layers.0.mlp.experts.gate_up_proj" in stored_tensors(tmp_path / "model")
        recipe = modifier("FP8_DYNAMIC", ignore=[*HEADS, "re:.*gate$"])
        both(tmp_path / "model", recipe, tmp_path)

    def test_weights_come_and_go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """What is in memory at a time does not depend on the number of layers."""
        model = model_folder(tmp_path / "model", num_hidden_layers=12)
        alive: dict[int, int] = {}
        peak, map_it = [0], StoredTensor.map

        def mapping(self: StoredTensor) -> torch.Tensor:
            found = map_it(self)
            memory = found.view(torch.int16).numpy().copy()  # lives as long as any view of it
            alive[id(memory)] = memory.nbytes
            peak[0] = max(peak[0], sum(list(alive.values())))
            weakref.finalize(memory, alive.pop, id(memory))
            return torch.from_numpy(memory).view(found.dtype)

        monkeypatch.setattr(StoredTensor, "map", mapping)
        quantize(model, modifier("W4A16"), tmp_path / "out")
        layer = sum(
            tensor.size for name, tensor in stored_tensors(model).items() if ".layers.0." in name
        )
        assert 0 < peak[0] < 1.5 * layer

    def test_what_is_told_while_it_runs_and_at_the_end(self, tmp_path: Path) -> None:
        """Names on disk are not those in the model, by which modules are counted."""
        model = model_folder(tmp_path / "model", "mixtral")
        told: dict[str, tuple[float, float]] = {}

        class Heard(Progress):
            @contextmanager
            def counting(self, what: str, total: float, unit: str) -> Iterator[Any]:
                with super().counting(what, total, unit) as add:
                    told[what] = (0, total)

                    def heard(number: float, note: str = "") -> None:
                        told[what] = (told[what][0] + number, total)
                        add(number, note)

                    yield heard

        recipe = modifier("FP8_DYNAMIC", ignore=[*HEADS, "re:.*gate$"])
        found = calipers.quantize(
            model, recipe, output_dir=tmp_path / "out", progress=Heard(shown=False)
        )
        assert told["quantizing"] == (len(found.plan.modules), len(found.plan.modules))
        assert f"written to: {tmp_path / 'out'}" in repr(found)
        worst = max(found.errors, key=lambda name: found.errors[name])
        page = found._repr_html_()
        assert page.index("Weights that lose most") < page.index(worst)


def _dtype(options: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": options.pop("dtype")} if "dtype" in options else {}


class TestFromMeasurements:
    @pytest.mark.parametrize(
        "recipe",
        [
            modifier("W8A8_STATIC"),
            modifier("FP8", observer={"input": "histogram_mse"}),
            modifier("W8A8_STATIC", observer={"input": {"name": "percentile", "percentile": 99}}),
            modifier("NVFP4"),
            modifier("FP8_DYNAMIC", kv_cache_scheme=HEAD_CACHE),
            WITH_OUTPUTS,
            modifier("NVFP4A16", weight_observer={"name": "optimal", "importance": "hessian"}),
            modifier("W4A16", gptq=True, error_propagation="float"),
            modifier("W8A8_STATIC", gptq=True, error_propagation="float"),
        ],
        ids=str,
    )
    def test_the_checkpoint_is_that_of_oneshot_on_the_data(
        self, llama: Path, seen: Measurements, tmp_path: Path, recipe: Any
    ) -> None:
        both(llama, recipe, tmp_path, IDS, measurements=seen)
        notes = json.loads((tmp_path / "disk" / "calipers.json").read_text())
        assert (notes["pipeline"], notes["samples"], notes["tokens"]) == ("measurements", 6, 240)

    def test_costs_are_those_of_oneshot(
        self, llama: Path, seen: Measurements, tmp_path: Path
    ) -> None:
        recipe = modifier("W8A8_STATIC")
        there = calipers.oneshot(llama, recipe, IDS, progress=False).costs
        here = quantize(llama, recipe, tmp_path / "out", measurements=seen).costs
        assert here.keys() == there.keys()
        for name, cost in here.items():
            assert cost.tensors == there[name].tensors
            assert cost.weight == pytest.approx(there[name].weight, rel=1e-2)

    def test_experts_and_a_file(self, tmp_path: Path) -> None:
        model = model_folder(tmp_path / "model", "mixtral")
        file, every = tmp_path / "m", {"calibrate_all_experts": True, "progress": False}
        calipers.measure(model, IDS, output_file=file, **every)
        recipe = modifier("W8A8_STATIC", ignore=[*HEADS, "re:.*gate$"])
        calipers.oneshot(model, recipe, IDS, output_dir=tmp_path / "memory", **every)
        quantize(model, recipe, tmp_path / "disk", measurements=file)
        assert_same_checkpoint(tmp_path / "disk", tmp_path / "memory")

    def test_merged_halves_are_the_whole(self, llama: Path, tmp_path: Path) -> None:
        halves = [calipers.measure(llama, part, progress=False) for part in (IDS[:3], IDS[3:])]
        both(llama, modifier("W8A8_STATIC"), tmp_path, IDS, measurements=halves[0].merge(halves[1]))

    def test_gptq_calibrates_on_float_inputs_and_says_so(
        self, llama: Path, seen: Measurements, tmp_path: Path
    ) -> None:
        recipe = modifier("W4A16", gptq=True)
        found = quantize(llama, recipe, tmp_path / "out", measurements=seen)
        assert "error_propagation: float" in (tmp_path / "out" / "recipe.yaml").read_text()
        assert found.plan.propagation == "float"
        assert recipe.error_propagation == "both"  # the user's own is not touched

    @pytest.mark.parametrize(
        "recipe",
        [
            pytest.param(modifier("W4A16", gptq=True), id="hessians"),
            pytest.param(modifier("W8A8_STATIC"), id="counts", marks=pytest.mark.slow),
            pytest.param(modifier("NVFP4"), id="channels", marks=pytest.mark.slow),
        ],
    )
    def test_statistics_come_and_go(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Any
    ) -> None:
        """What is in memory of a file at a time does not depend on the number of layers."""
        model = model_folder(tmp_path / "model", num_hidden_layers=12)
        file = tmp_path / "seen"
        calipers.measure(model, IDS, collect="hessian", output_file=file, progress=False)
        alive: dict[int, int] = {}
        peak, read = [0], OpenFile.read

        def reading(self: OpenFile, stored: StoredTensor) -> Any:
            pages = read(self, stored)
            alive[id(pages)] = len(pages)
            peak[0] = max(peak[0], sum(list(alive.values())))
            weakref.finalize(pages, alive.pop, id(pages))
            return pages

        monkeypatch.setattr(OpenFile, "read", reading)
        quantize(model, recipe, tmp_path / "out", measurements=file)
        stored = read_header(file)
        layer = sum(each.size for name, each in stored.items() if ".layers.0." in name)
        assert 0 < peak[0] <= layer

    @pytest.mark.parametrize("policy", ["weights_only", "peers"])
    def test_experts_that_saw_nothing(self, tmp_path: Path, policy: str) -> None:
        model = model_folder(tmp_path / "model", "mixtral", num_local_experts=8)
        few = IDS[:1, :3]
        recipe = modifier("W8A8_STATIC", ignore=[*HEADS, "re:.*gate$"])
        seen = calipers.measure(model, few, progress=False)
        with pytest.raises(CalipersError, match="saw no tokens"):
            quantize(model, recipe, tmp_path / "no", measurements=seen)
        assert not (tmp_path / "no").exists()
        options: dict[str, Any] = {"on_unseen": policy}
        calipers.oneshot(
            model, recipe, few, output_dir=tmp_path / "memory", progress=False, **options
        )
        found = quantize(model, recipe, tmp_path / "disk", measurements=seen, **options)
        assert found.coverage.applied
        assert_same_checkpoint(tmp_path / "disk", tmp_path / "memory")


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

    @pytest.mark.parametrize("names", ["quantized", "measured"])
    def test_a_step_that_changes_other_weights(
        self, names: str, llama: Path, seen: Measurements, tmp_path: Path
    ) -> None:
        """As oneshot would write them; from disk to disk they would be lost."""
        norm = "model.layers.1.input_layernorm"

        class Doubling(Modifier):
            def plan(self, model: torch.nn.Module, step: str) -> StepPlan:  # noqa: ARG002
                wanted = Requirement("input", SQUARES, lambda _: SquareSums(), is_optional=True)
                return StepPlan(measured={norm: (wanted,)} if names == "measured" else {})

            def solve(self, layer: Any) -> Changes:
                if names == "measured" and norm not in layer.names:
                    return Changes()
                return Changes(weights={norm: 2 * torch.ones_like(layer.weight(norm))})

        recipe = [Doubling(), modifier("W4A16")]
        with pytest.raises(ConfigurationError, match=f"would lose that: {norm}") as error:
            quantize(llama, recipe, tmp_path / "out", measurements=seen)
        assert "to oneshot, in Python" in str(error.value)
        assert os.listdir(tmp_path) == []
        calipers.oneshot(llama, recipe, IDS, output_dir=tmp_path / "memory", progress=False)
        stored = stored_tensors(tmp_path / "memory")[f"{norm}.weight"].read()
        assert bool((stored == 2).all())

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
