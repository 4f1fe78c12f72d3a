from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from models import small_llama, small_mixtral

import calipers
from calipers.errors import CalipersWarning, ConfigurationError, DataError, RecipeError
from calipers.steps import tuning
from calipers.steps.tuning import NOT_FINITE, TuningModifier

STEP = "TuningModifier"
IDS = torch.randint(90, (12, 24), generator=torch.Generator().manual_seed(5))


def llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(1)
    model: Any = small_llama(vocab_size=96)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.15) if "norm" not in name else parameter.uniform_(0.5, 2)
    return model.to(dtype).eval()


def weights(scheme: str) -> dict[str, Any]:
    return {"QuantizationModifier": {"scheme": scheme, "ignore": ["lm_head"]}}


def run(model: Any, how: Any, data: Any = IDS, **tuned: Any) -> Any:
    recipe = [calipers.QuantizationModifier(**how["QuantizationModifier"])]
    if tuned:
        recipe.append(TuningModifier(**tuned))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        return calipers.oneshot(model, recipe, data, shuffle=False, progress=False, dtype="float32")


INT3 = {
    "QuantizationModifier": {
        "targets": ["Linear"],
        "ignore": ["lm_head"],
        "weights": {"num_bits": 3, "strategy": "group", "group_size": 32},
    }
}


def divergence_on(rows: list[int], model: Any, teacher: Any) -> float:
    """KL in nats a token, in float64, of what comes out of two models."""
    total, tokens = 0.0, 0
    for row in rows:
        with torch.no_grad():
            pair = [m(IDS[row : row + 1]).logits[0, :-1].double() for m in (teacher, model)]
        p, q = (logits.log_softmax(-1) for logits in pair)
        total += float((p.exp() * (p - q)).sum())
        tokens += len(p)
    return total / tokens


def loaded(frozen: Any) -> Any:
    """A float32 model with the very numbers that a frozen one computes with."""
    model = llama(torch.float32)
    state = {name: value for name, value in frozen.state_dict().items() if "_scale" not in name}
    for name, module in frozen.named_modules():
        if getattr(module, "quantization_scheme", None) is not None:
            args, scale = module.quantization_scheme.weights, module.weight_scale
            state[f"{name}.weight"] = fake_quantize(module.weight, scale, None, args)
    missing, _ = model.load_state_dict(state, strict=False)
    assert not missing
    return model


def held_out(seed: int = 0, part: float = 0.2) -> list[int]:
    order = torch.randperm(len(IDS), generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(order[: max(2, round(part * len(IDS)))])


class TestWhatIsTuned:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_judged_as_it_is_stored(self, dtype: torch.dtype) -> None:
        result = run(llama(dtype), INT3, epochs=4, lr=1e-2)
        figures = result.figures[STEP]
        assert figures["after"] < figures["before"]
        after = divergence_on(held_out(), loaded(result.model), llama(dtype).float())
        assert after == pytest.approx(figures["after"], rel=1e-3)
        before = loaded(run(llama(dtype), INT3).model)
        expected = divergence_on(held_out(), before, llama(dtype).float())
        assert figures["before"] == pytest.approx(expected, rel=1e-3)

    def test_is_scales_and_norms_alone(self) -> None:
        before, after = (run(llama(), INT3, **kw).model for kw in ({}, {"epochs": 3, "lr": 3e-3}))
        one, other = before.state_dict(), after.state_dict()
        changed = {
            name.rsplit(".", 1)[1] for name in one if not torch.equal(one[name], other[name])
        }
        assert changed == {"weight", "weight_scale"}
        for name, module in after.named_modules():
            if getattr(module, "quantization_scheme", None) is not None:
                scale = other[f"{name}.weight_scale"].float().repeat_interleave(32, 1)
                codes = other[f"{name}.weight"].float() / scale
                torch.testing.assert_close(codes, codes.round(), rtol=0, atol=0.02)
        untouched = [name for name in one if "embed" in name or "lm_head" in name]
        assert all(torch.equal(one[name], other[name]) for name in untouched)

    def test_mx_scales_stay_and_norms_are_tuned(self) -> None:
        one, other = (
            run(llama(), weights("MXFP4A16"), **kw).model.state_dict()
            for kw in ({}, {"epochs": 4, "lr": 3e-3})
        )
        changed = {name for name in one if not torch.equal(one[name], other[name])}
        assert changed
        assert all("norm" in name for name in changed)

    @pytest.mark.parametrize("scheme", ["NVFP4", "FP8", "W8A8", "FP8_DYNAMIC", "NVFP4A16"])
    def test_sees_quantized_activations(self, scheme: str) -> None:
        result = run(llama(torch.float32), weights(scheme), epochs=3, lr=1e-3)
        figures = result.figures[STEP]
        expected = divergence_on(held_out(), result.model, llama(torch.float32))
        assert figures["after"] <= figures["before"]
        assert expected == pytest.approx(figures["after"], rel=5e-3)

    def test_includes_experts(self) -> None:
        torch.manual_seed(0)
        model: Any = small_mixtral().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4) if parameter.ndim > 1 else None
        result = run(model, INT3, epochs=3, lr=3e-3)
        assert result.figures[STEP]["after"] < result.figures[STEP]["before"]


def test_gradients_are_those_of_the_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Central differences of the whole forward pass, in float32, at some scales and norms."""
    checked = 0

    def compare(whole: Any, tuned: Any, changes: Any, batches: Any) -> bool:
        nonlocal checked
        assert own(whole, tuned, changes, batches)
        batch = batches[0]

        def loss() -> float:
            with torch.no_grad():
                teacher, rows = whole.predictions(batch)
                with whole.quantized(tuned.changed(changes)):
                    student = whole.predictions(batch)[0]
                return float(tuning.divergence(teacher.double(), student.double())) / rows

        for place in (*list(changes)[:3], *list(changes)[-3:]):
            change = changes[place]
            at = int(change.grad.abs().argmax())
            ends = []
            for step in (0.02, -0.02):
                with torch.no_grad():
                    change.view(-1)[at] += step
                    ends.append(loss())
                    change.view(-1)[at] -= step
            slope = (ends[0] - ends[1]) / 0.04
            assert float(change.grad.view(-1)[at]) == pytest.approx(slope, rel=0.05)
            checked += 1
        return False

    own = tuning._set_gradients
    monkeypatch.setattr(tuning, "_set_gradients", compare)
    run(llama(torch.float32), INT3, batch_size=1)
    assert checked == 6


@settings(max_examples=5)
@given(
    lr=st.sampled_from([1e-4, 1e-2, 0.3, 30.0]),
    seed=st.integers(0, 9),
    batch_size=st.integers(1, 5),
)
def test_nothing_is_accepted_that_is_worse_held_out(lr: float, seed: int, batch_size: int) -> None:
    result = run(llama(), INT3, lr=lr, seed=seed, batch_size=batch_size, epochs=1)
    figures = result.figures[STEP]
    assert figures["after"] <= figures["before"]
    after = divergence_on(held_out(seed), loaded(result.model), llama().float())
    assert after == pytest.approx(figures["after"], rel=1e-3)


class TestWhereItDoesNotHelp:
    def unchanged(self, result: Any) -> bool:
        one, other = run(llama(), INT3).model.state_dict(), result.model.state_dict()
        return all(torch.equal(one[name], other[name]) for name in one)

    def test_the_model_is_as_without_it(self) -> None:
        result = run(llama(), INT3, lr=1.0, epochs=1)
        assert self.unchanged(result)
        assert "left as it was" in result.notes[STEP]
        assert result.figures[STEP]["before"] == result.figures[STEP]["after"]

    def test_a_step_that_is_not_finite_ends_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = 0

        def broken(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += student.requires_grad
            loss = own(teacher, student)
            return loss * math.nan if calls > 6 and student.requires_grad else loss

        own = tuning.divergence
        monkeypatch.setattr(tuning, "divergence", broken)
        result = run(llama(), INT3, lr=3e-3, batch_size=1)
        assert result.notes[STEP] == NOT_FINITE
        assert 0 < result.figures[STEP]["steps"] <= 6
        assert result.figures[STEP]["after"] < result.figures[STEP]["before"]


def test_however_much_is_held_out_some_is_left_to_train_on() -> None:
    result = run(llama(), INT3, IDS[:4], held_out=0.99, iters=3)
    assert result.figures[STEP]["steps"] <= 3


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"iters": 0}, r"TuningModifier\.iters must be greater than or equal to 1"),
            ({"epochs": 0}, "TuningModifier.epochs"),
            ({"held_out": 1.0}, "TuningModifier.held_out"),
            ({"lr": math.nan}, "TuningModifier.lr"),
            ({"rate": 1.0}, "unknown key 'rate'"),
        ],
    )
    def test_of_options(self, options: Any, said: str) -> None:
        with pytest.raises(RecipeError, match=said):
            TuningModifier(**options)

    def test_of_few_samples(self) -> None:
        model = llama()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(DataError, match="3 samples: too few"):
            run(model, INT3, IDS[:3], epochs=1)
        assert before.keys() == model.state_dict().keys()

    def test_without_data(self) -> None:
        with pytest.raises(ConfigurationError, match="needs data for 1 tensor"):
            run(llama(), INT3, None, epochs=1)

    def test_of_models_that_do_not_run(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        llama().save_pretrained(folder)
        recipe = [calipers.QuantizationModifier(**INT3["QuantizationModifier"]), TuningModifier()]
        with pytest.raises(ConfigurationError, match="data runs through, and here none runs"):
            calipers.oneshot(folder, recipe, output_dir=tmp_path / "out")
        assert not (tmp_path / "out").exists()

    @pytest.mark.filterwarnings("ignore:The data has")
    def test_of_offloaded_models(self, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        llama().save_pretrained(folder)
        recipe = [calipers.QuantizationModifier(**INT3["QuantizationModifier"]), TuningModifier()]
        with pytest.raises(ConfigurationError, match="its tensors are offloaded"):
            calipers.oneshot(folder, recipe, IDS, pipeline="sequential", progress=False)

    def test_of_models_that_are_too_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("calipers.calibration.whole_model.free_memory", lambda _: 1 << 20)
        with pytest.raises(ConfigurationError, match="GB of memory, and cpu has"):
            run(llama(), INT3, epochs=1)


def test_what_was_reached_stands_in_the_checkpoint(tmp_path: Path) -> None:
    recipe = f"""
modifiers:
  QuantizationModifier: {{scheme: W8A8, ignore: [lm_head]}}
  {STEP}: {{iters: 3, lr: 0.0001}}
"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        calipers.oneshot(llama(), recipe, IDS, output_dir=tmp_path / "out", progress=False)
    told = (tmp_path / "out" / "calipers.json").read_text()
    assert STEP in told
    assert '"before"' in told
