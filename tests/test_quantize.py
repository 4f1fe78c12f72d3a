"""From disk to disk: the checkpoint is that of ``oneshot``, to the bit."""

from __future__ import annotations

import json
import re
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
from calipers.checkpoint.reader import load_model
from calipers.engine.quantize import prepare_model
from calipers.engine.streaming import CheckpointSink
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
from calipers.measurements.file_format import OpenFile
from calipers.planning.plan import StepPlan
from calipers.planning.specs import SQUARES, Requirement
from calipers.recipes import load_recipe
from calipers.runtime.progress import Progress
from calipers.statistics.sums import SquareSums
from calipers.steps import Modifier
from calipers.steps.base import Changes

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
    calipers.oneshot(load_model(model), recipe, data, output_dir=tmp / "memory", progress=False)
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


NORM, HEAD = "model.layers.1.input_layernorm", "lm_head"
UP = "model.layers.1.mlp.up_proj"


class Changing(Modifier):
    """A step that answers what it is told to, as soon as it is given the module."""

    module: str
    changes: Any
    claims: str = "changed"

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:  # noqa: ARG002
        if self.claims == "measured":
            wanted = Requirement("input", SQUARES, lambda _: SquareSums(), is_optional=True)
            return StepPlan(measured={self.module: (wanted,)})
        return StepPlan(changed=(self.module,) if self.claims == "changed" else ())

    def solve(self, layer: Any) -> Changes:
        if self.claims != "nothing" and self.module not in layer.names:
            return Changes()
        return Changes(**self.changes(layer))


def scaled(module: str, tensor: str, factor: float) -> Any:
    return lambda layer: {
        "tensors": {(module, tensor): factor * layer.tensor(module, tensor).detach()}
    }


class TestStepsThatChangeTensors:
    @pytest.mark.parametrize(
        ("family", "module", "tensor", "claims"),
        [
            ("llama", NORM, "weight", "changed"),
            ("llama", NORM, "weight", "measured"),
            ("llama", UP, "weight", "changed"),  # which is quantized, too
            ("llama", "model.norm", "weight", "changed"),
            ("llama", "model.embed_tokens", "weight", "changed"),
            ("llama tied", "model.embed_tokens", "weight", "changed"),
            ("llama tied", HEAD, "weight", "changed"),  # stored as the embedding, far before it
            ("qwen2", "model.layers.0.self_attn.q_proj", "bias", "changed"),
        ],
    )
    def test_both_ways_store_the_same(
        self, tmp_path: Path, family: str, module: str, tensor: str, claims: str
    ) -> None:
        model = model_folder(tmp_path / "model", family)
        step = Changing(module=module, changes=scaled(module, tensor, 2), claims=claims)
        data = {"measurements": calipers.measure(model, IDS, progress=False)}
        options: dict[str, Any] = data if claims == "measured" else {}
        recipe = [step, modifier("W4A16")]
        both(model, recipe, tmp_path, IDS if options else None, **options)
        if module == UP:
            return
        place = f"{module}.{tensor}".replace(HEAD, "model.embed_tokens" if "tied" in family else "")
        before, after = (stored_tensors(tmp_path / n)[place].read() for n in ("model", "disk"))
        assert torch.equal(after, 2 * before)

    def test_later_steps_and_errors_see_the_new_weight(self, llama: Path, tmp_path: Path) -> None:
        recipe = [Changing(module=UP, changes=scaled(UP, "weight", 0)), modifier("W4A16")]
        here = quantize(llama, recipe, tmp_path / "out")
        assert here.errors[UP] == 0 < here.errors[UP.replace("up", "gate")]

    def test_attributes_are_published_and_stored_nowhere(self, llama: Path, tmp_path: Path) -> None:
        step = Changing(module=UP, changes=lambda _: {"published": {UP: {"_mark": torch.ones(3)}}})
        recipe = [step, modifier("W4A16")]
        both(llama, recipe, tmp_path)
        prepared = prepare_model(llama, load_recipe(recipe), None)
        for _ in CheckpointSink(prepared, Progress(False)).tensors({}):
            pass
        assert torch.equal(prepared.model.get_submodule(UP)._mark, torch.ones(3))

    @pytest.mark.parametrize("way", ["memory", "disk"])
    @pytest.mark.parametrize(
        ("changes", "claims", "told"),
        [
            (
                scaled(NORM, "weight", 2),
                "nothing",
                f"changes '{NORM}.weight', but it was not given",
            ),
            (
                lambda _: {"tensors": {("model.nowhere", "weight"): torch.ones(1)}},
                "changed",
                "changes 'model.nowhere.weight', but LlamaForCausalLM has no such module",
            ),
            (
                lambda _: {"tensors": {(NORM, "bias"): torch.ones(1)}},
                "changed",
                f"changes '{NORM}.bias', but LlamaRMSNorm has no such tensor. Allowed: weight",
            ),
            (
                lambda _: {"tensors": {(NORM, "weight"): torch.ones(3)}},
                "changed",
                f"'{NORM}.weight' to a value of another form: torch.float32 of shape (3). It must "
                "be torch.bfloat16 of shape (128)",
            ),
            (
                lambda _: {"qparams": {(NORM, "weight"): {"scale": torch.ones(1)}}},
                "changed",
                f"finds parameters of '{NORM}.weight', which it did not plan to quantize",
            ),
            (
                lambda _: {"published": {NORM: {"weight": torch.ones(1)}}},
                "changed",
                f"publishes '{NORM}.weight', which is a tensor of the module",
            ),
        ],
    )
    def test_what_does_not_fit_names_step_and_tensor(
        self, llama: Path, tmp_path: Path, way: str, changes: Any, claims: str, told: str
    ) -> None:
        recipe = [Changing(module=NORM, changes=changes, claims=claims), modifier("W4A16")]
        model = load_model(llama) if way == "memory" else llama
        run = calipers.oneshot if way == "memory" else calipers.quantize
        with pytest.raises(ConfigurationError, match=re.escape(told)) as error:
            run(model, recipe, output_dir=tmp_path / "out", progress=False)
        assert "Changing (number 1 of stage 'default')" in str(error.value)
        assert not (tmp_path / "out").exists()


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
