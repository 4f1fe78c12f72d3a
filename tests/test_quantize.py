"""From disk to disk: the checkpoint is that of ``oneshot``, to the bit."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from quantizing import (
    HEAD_CACHE,
    HEADS,
    IDS,
    WITH_OUTPUTS,
    assert_same_checkpoint,
    both,
    measured,
    model_folder,
    modifier,
    quantize,
)

import calipers
from calipers import Measurements
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.reader import load_model
from calipers.errors import (
    CalipersError,
    ConfigurationError,
    MeasurementsError,
)
from calipers.files.safetensors_header import StoredTensor, read_header
from calipers.measurements.file_format import OpenFile
from calipers.runtime.progress import Progress

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="module")
def seen(llama: Path) -> Measurements:
    return measured(llama)


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
        calipers.oneshot(load_model(llama), recipe, output_dir=tmp_path / "memory", **options)
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


UP = "model.layers.1.mlp.up_proj"


class TestWhichWay:
    @pytest.mark.usefixtures("never_loaded")
    def test_oneshot_loads_no_model_that_need_not_run(self, llama: Path, tmp_path: Path) -> None:
        options: dict[str, Any] = {"output_dir": tmp_path / "out", "progress": False}
        found = calipers.oneshot(str(llama), modifier("FP8_DYNAMIC"), **options)
        quantize(llama, modifier("FP8_DYNAMIC"), tmp_path / "disk")
        assert_same_checkpoint(tmp_path / "out", tmp_path / "disk")
        assert all(tensor.is_meta for tensor in found.model.get_submodule(UP).parameters())
        assert (found.pipeline, found.samples, found.tokens) == ("datafree", 0, 0)
        assert (found.dtype, found.forward_dtype, found.source) == (torch.bfloat16, None, llama)

    @pytest.mark.parametrize("loaded", [True, False])
    def test_measurements_stand_for_data(
        self, llama: Path, seen: Measurements, tmp_path: Path, loaded: bool
    ) -> None:
        recipe = modifier("W8A8_STATIC")
        options: dict[str, Any] = {"output_dir": tmp_path / "out", "progress": False}
        model = load_model(llama) if loaded else llama
        found = calipers.oneshot(model, recipe, measurements=seen, **options)
        quantize(llama, recipe, tmp_path / "disk", measurements=seen)
        assert_same_checkpoint(tmp_path / "out", tmp_path / "disk")
        assert (found.pipeline, found.samples, found.tokens) == ("measurements", 6, 240)
        assert found.model.get_submodule(UP).weight.is_meta != loaded
        with pytest.raises(ConfigurationError, match="There are both dataset and measurements"):
            calipers.oneshot(model, recipe, IDS, measurements=seen, progress=False)

    def test_other_weights_in_memory(self, llama: Path, seen: Measurements) -> None:
        model = load_model(llama)
        model.get_submodule(UP).weight.data.mul_(2)
        with pytest.raises(MeasurementsError, match="or of other weights"):
            calipers.oneshot(model, modifier("FP8"), measurements=seen, progress=False)

    def test_what_data_has_run_is_told(self, llama: Path) -> None:
        found = calipers.oneshot(llama, modifier("W8A8_STATIC"), IDS, progress=False)
        assert (found.pipeline, found.samples, found.tokens) == ("basic", 6, 240)
        assert found.forward_dtype is not None
        assert found.seconds > 0

    def test_all_mistakes_are_told_at_once(self, llama: Path, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        options: dict[str, Any] = {"on_unseen": "x", "dtype": "fp16", "num_calibration_samples": 0}
        with pytest.raises(ConfigurationError) as error:
            calipers.oneshot(llama, "W4A61", output_dir=tmp_path / "out", **options)
        told = str(error.value).splitlines()
        assert told[0] == "There are 5 mistakes:"
        wanted = ("exists already", "num_samples=0", "'float16'", "on_unseen='x'", "'W4A61'")
        assert all(text in line for text, line in zip(wanted, told[1:], strict=True))
