"""A model that computes in another dtype than it has; what is stored stays its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from families import Untouched, build, saved, token_ids
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoModelForCausalLM

from calipers import evaluate, oneshot
from calipers.calibration.context import Calibration
from calipers.errors import CalipersWarning, ConfigurationError
from calipers.observers import Observer
from calipers.observers.spec import RANGE
from calipers.recipes import load_recipe
from calipers.runtime import precision
from calipers.runtime.precision import computing_in, forward_dtype, onloaded

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj"
STATIC = """
modifiers:
  QuantizationModifier:
    ignore: [lm_head]
    weights: {num_bits: 8, strategy: channel}
    weight_observer: memoryless_mse
    input_activations: {num_bits: 8, strategy: tensor, observer: histogram_mse}
    kv_cache_scheme: {num_bits: 8, type: float, observer: static_minmax}
"""


def cpu_with(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    monkeypatch.setattr(precision, "cpu_features", lambda: dict.fromkeys(features, True))


@pytest.mark.parametrize(
    ("features", "dtype", "expected"),
    [
        ((), torch.bfloat16, torch.float32),
        (("avx512_f", "fp16_arith"), torch.bfloat16, torch.float32),
        (("avx512_bf16",), torch.bfloat16, torch.bfloat16),
        (("amx_bf16",), torch.bfloat16, torch.bfloat16),
        (("bf16",), torch.bfloat16, torch.bfloat16),
        (("avx512_bf16",), torch.float16, torch.float32),
        (("avx512_fp16",), torch.float16, torch.float16),
        ((), torch.float32, torch.float32),
    ],
)
def test_a_cpu_without_instructions_for_a_dtype_computes_in_float32(
    features: tuple[str, ...],
    dtype: torch.dtype,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu_with(monkeypatch, *features)
    model = torch.nn.Linear(2, 2, dtype=dtype)
    assert forward_dtype("auto", model, CPU) == expected
    assert forward_dtype("auto", model, torch.device("meta")) == dtype  # any other device
    assert forward_dtype("float16", model, CPU) == torch.float16


def test_a_dtype_that_is_none_is_refused_before_anything_is_loaded() -> None:
    text = r"^dtype='int8' is not allowed\. Allowed: auto, float32, bfloat16, float16\.$"
    with pytest.raises(ConfigurationError, match=text):
        oneshot("nowhere/at/all", "FP8", dtype="int8")  # type: ignore[arg-type]


def test_tensors_are_back_as_they_were_also_after_an_error() -> None:
    model = build("llama tied", torch.bfloat16)
    model.model.norm.register_buffer("precise", torch.tensor([1 / 3]))
    before = {name: (t, t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    with suppress(RuntimeError), computing_in(torch.float32, [model]):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        raise RuntimeError
    with computing_in(torch.float16, [model]):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
        assert model.model.norm.precise.dtype == torch.float32  # never narrower
    after = model.state_dict(keep_vars=True)
    assert {name: (t, t.data_ptr()) for name, t in after.items()} == before
    assert model.dtype == torch.bfloat16


@contextmanager
def dtypes_of_inputs() -> Iterator[set[torch.dtype]]:
    """The dtypes of what goes into the Linear modules of any model."""
    found = set()

    def look(module: torch.nn.Module, args: Any) -> None:
        if isinstance(module, torch.nn.Linear):
            found.add(args[0].dtype)

    with register_module_forward_pre_hook(look):
        yield found


def expected_scales(model: Any, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """What observers say who see float32 activations rounded to bfloat16, batch by batch."""
    model = model.float()
    int8, fp8 = QuantizationArgs(num_bits=8), QuantizationArgs(num_bits=8, type="float")
    seen = {
        "input": Observer.load_from_registry("histogram_mse", base_name="input", args=int8),
        "v": Observer.load_from_registry("static_minmax", base_name="output", args=fp8),
    }

    def look(_module: Any, args: Any) -> None:
        seen["input"](args[0].bfloat16())

    def look_at_values(_module: Any, _args: Any, output: Any) -> None:
        seen["v"](output.bfloat16())

    model.get_submodule(DOWN).register_forward_pre_hook(look)
    model.model.layers[1].self_attn.v_proj.register_forward_hook(look_at_values)
    with torch.no_grad():
        for row in data:
            model(row[None])
    return {name: observer.get_qparams()["scale"] for name, observer in seen.items()}


@pytest.mark.parametrize("way", ["basic", "sequential", "from disk"])
def test_what_is_stored_is_that_of_the_model(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_with(monkeypatch)
    model, data = build("llama", torch.bfloat16), token_ids(32, 128)
    source: Any = saved(model, tmp_path / "model") if way == "from disk" else model
    with dtypes_of_inputs() as computed:
        done = oneshot(
            source,
            STATIC,
            data,
            output_dir=tmp_path / "out",
            num_calibration_samples=32,
            pipeline="basic" if way == "basic" else "sequential",
        )
    assert computed == {torch.float32}
    assert done.model.dtype == torch.bfloat16
    stored = load_file(tmp_path / "out" / "model.safetensors")
    floats = {t.dtype for name, t in stored.items() if t.is_floating_point()}
    assert floats == {torch.bfloat16}
    expected = expected_scales(build("llama", torch.bfloat16), data)
    assert torch.equal(stored[f"{DOWN}.input_scale"], expected["input"])
    assert torch.equal(stored["model.layers.1.self_attn.v_scale"], expected["v"])
    notes = json.loads((tmp_path / "out" / "calipers.json").read_text())
    assert notes["forward_dtype"] == "float32"


def test_observers_see_activations_in_the_dtype_of_their_module() -> None:
    model = build("llama", torch.bfloat16)
    plan = load_recipe(STATIC).compile(model)
    with Calibration(model, plan, dtype=torch.float32) as calibration:
        with (
            computing_in(torch.float32, [model]),
            calibration.batch(0),
            dtypes_of_inputs() as computed,
        ):
            model(token_ids(2, 8))
        calibration.finish(plan.names)
    assert computed == {torch.float32}
    seen = calibration.measurements
    tensors = [(m.name, t) for m, t in plan if t.base_name != "weight" and t.observer is not None]
    assert len(tensors) >= len(plan.names)
    for name, tensor in tensors:
        found = {key: seen.get(name, tensor.base_name, key) for key in tensor.observer.statistics}
        assert found[RANGE].observed_like.dtype == torch.bfloat16
        assert tensor.observer.solve_stream(found)["scale"].dtype == torch.bfloat16


def test_weights_are_judged_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        with dtypes_of_inputs() as computed:
            oneshot(
                build("llama", torch.bfloat16),
                STATIC,
                token_ids(32, 128),
                output_dir=tmp_path / dtype,
                num_calibration_samples=32,
                dtype=dtype,  # type: ignore[arg-type]
            )
        assert computed == {getattr(torch, dtype)}
    one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("float32", "bfloat16"))
    names = [name for name in one if not name.endswith(("input_scale", "k_scale", "v_scale"))]
    assert len(names) > 30
    assert all(torch.equal(one[name], other[name]) for name in names)


def test_a_failed_run_leaves_the_model_as_it_was() -> None:
    model = build("llama", torch.bfloat16)
    before = Untouched(model)
    down = model.get_submodule(DOWN)
    handle = down.register_forward_pre_hook(lambda *_: (torch.full((1, 4, 256), torch.nan),))
    with pytest.raises(Exception, match="batch 0"):
        oneshot(model, STATIC, token_ids(32, 128), num_calibration_samples=32, dtype="float32")
    handle.remove()
    before.check()


@torch.no_grad()
def perplexity(model: Any, data: torch.Tensor) -> float:
    logs = [model(row[None]).logits[0, :-1].double().log_softmax(-1) for row in data]
    chosen = [log.gather(-1, row[1:, None]).mean() for log, row in zip(logs, data, strict=True)]
    return float((-torch.stack(chosen).mean()).exp())


def test_evaluate_computes_in_float32_with_the_weights_of_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu_with(monkeypatch)
    model, data = build("llama", torch.bfloat16), token_ids(20, 32)
    oneshot(build("llama", torch.bfloat16), "W8A16", output_dir=tmp_path / "out")
    with pytest.warns(CalipersWarning, match="no bfloat16 instructions: the models compute in flo"):
        found = evaluate(model, [tmp_path / "out"], data)
    assert model.dtype == torch.bfloat16
    assert found.base.perplexity.value == pytest.approx(perplexity(model.float(), data), rel=1e-6)
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    quantized(data[:1, :1])  # unpacked: its weights are bfloat16 from now on
    torch.nn.Module.float(quantized)
    scores = found.checkpoints["out"]
    assert scores.perplexity.value == pytest.approx(perplexity(quantized, data), rel=1e-6)


def test_tensors_return_to_where_they_were() -> None:
    """Torch takes the first CPU for another device than the CPU, and copies."""
    module = nn.BatchNorm1d(4)
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    with onloaded([module], torch.device("cpu:0")):
        for name, tensor in module.state_dict().items():
            assert tensor.data_ptr() != before[name]
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before
