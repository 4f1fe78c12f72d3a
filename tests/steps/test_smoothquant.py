"""SmoothQuant: its recipes, its factors, what it leaves unchanged and what it makes better."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Untouched, build, logits_of
from massive import BOS, massive_llama, samples
from quantizing import HEADS, IDS, both, model_folder, quantize
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

import calipers
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.reader import load_model
from calipers.errors import CalipersWarning, ConfigurationError, RecipeError, TensorValueError
from calipers.recipes import load_recipe
from calipers.steps.transforms.smoothquant import SmoothQuantModifier

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

# As the documentation of llm-compressor describes it: SmoothQuant, then GPTQ, in one stage.
RECIPE = """
quant_stage:
  quant_modifiers:
    SmoothQuantModifier:
      smoothing_strength: 0.8
      mappings:
        - [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"]
        - [["re:.*gate_proj", "re:.*up_proj"], "re:.*post_attention_layernorm"]
      ignore: ["lm_head"]
      num_calibration_steps: 512
    GPTQModifier:
      targets: "Linear"
      scheme: "W8A8"
      ignore: ["lm_head"]
"""
NORM, UP = "model.layers.0.input_layernorm", "model.layers.1.mlp.up_proj"


def transformed(model: Any, data: Any = IDS, **options: Any) -> calipers.OneshotResult:
    """Smooth a model, and quantize nothing."""
    return calipers.oneshot(model, [SmoothQuantModifier(**options)], data, progress=False)


class TestFactors:
    def test_they_are_those_of_the_formula(self) -> None:
        model = build("llama")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        seen: list[Tensor] = []
        norm = model.get_submodule(NORM)
        handle = norm.register_forward_hook(lambda _m, _a, out: seen.append(out.detach()))
        with torch.no_grad():
            model(IDS, use_cache=False)
        handle.remove()
        result = transformed(model, smoothing_strength=0.3)
        ranges = seen[0].flatten(0, 1).amax(0) - seen[0].flatten(0, 1).amin(0)
        readers = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]
        weights = torch.cat([before[f"{name}.weight"] for name in readers])
        factors = ranges**0.3 / (2 * weights.abs().amax(0)) ** 0.7
        after = model.state_dict()
        torch.testing.assert_close(after[f"{NORM}.weight"], before[f"{NORM}.weight"] / factors)
        for name in readers[:2]:  # the rows of v_proj are divided, too
            torch.testing.assert_close(after[f"{name}.weight"], before[f"{name}.weight"] * factors)
        told = result.transforms[NORM]
        assert told["strength"] == 0.3
        assert told["readers"] == readers
        assert told["largest"] == pytest.approx(float(factors.max()))

    def test_padding_does_not_count(self) -> None:
        rows = [[5, 6, 7, 8], [9, 10]]
        padded = [{"input_ids": torch.tensor([row + [0] * (4 - len(row)) for row in rows]),
                   "attention_mask": torch.tensor([[1] * 4, [1, 1, 0, 0]])}]  # fmt: skip
        one, other = build("llama"), build("llama")
        transformed(one, rows)
        transformed(other, padded)
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(tensor, other.state_dict()[name])

    @pytest.mark.parametrize("pipeline", ["basic", "sequential"])
    def test_both_pipelines_do_the_same(self, pipeline: Any) -> None:
        model, other = build("llama"), build("llama")
        transformed(model)
        recipe = [SmoothQuantModifier()]
        calipers.oneshot(other, recipe, IDS, pipeline=pipeline, progress=False)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, other.state_dict()[name])


@pytest.mark.parametrize("family", ["llama", "llama tied", "qwen2", "mixtral", "qwen2-moe"])
@pytest.mark.parametrize("options", [{}, {"algorithm": "log_equalization"}])
def test_the_model_computes_the_same(family: str, options: dict[str, Any]) -> None:
    model = build(family)
    before = logits_of(model)
    result = transformed(model, **options)
    assert len(result.transforms) >= 4
    assert not torch.equal(logits_of(model), before)
    torch.testing.assert_close(logits_of(model), before, rtol=1e-4, atol=1e-5)


def test_a_norm_in_half_precision_loses_nothing() -> None:
    """Columns make up for what the norm can store of its new gain."""
    model = build("llama", torch.bfloat16)
    norm, query = model.get_submodule(NORM), "model.layers.0.self_attn.q_proj"
    with torch.no_grad():
        norm.weight.copy_(torch.rand(norm.weight.shape) + 0.5)
    before = norm.weight.double() * model.get_submodule(query).weight.double()
    transformed(model)
    after = norm.weight.double() * model.get_submodule(query).weight.double()
    relative = ((after - before) / before).abs().max()
    assert relative <= 2**-8 * 1.01  # one rounding, of the column


class TestRecipes:
    def test_one_of_llm_compressor_runs_unmodified(self, tmp_path: Path) -> None:
        model = build("llama")
        before = logits_of(model)
        result = calipers.oneshot(model, RECIPE, IDS, output_dir=tmp_path / "out", progress=False)
        assert {name.rpartition(".")[2] for name in result.transforms} == {
            "input_layernorm", "post_attention_layernorm",
        }  # fmt: skip
        assert len(result.errors) == 14
        error = (logits_of(model) - before).norm() / before.norm()
        assert error < 0.05
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(logits_of(again), logits_of(model), rtol=0.05, atol=0.02)
        assert load_recipe(result.recipe.to_yaml()) == result.recipe

    def test_both_ways_store_the_same(self, tmp_path: Path) -> None:
        model = model_folder(tmp_path / "model")
        seen = calipers.measure(model, IDS, progress=False)
        both(model, RECIPE.replace("GPTQ", "Quantization"), tmp_path, IDS, measurements=seen)

    @pytest.mark.parametrize("family", ["llama tied", "qwen2"])
    def test_from_disk_to_disk_of_static_activations(self, tmp_path: Path, family: str) -> None:
        """Ranges are those of extrema that were divided, up to the roundings of a stream."""
        model = model_folder(tmp_path / "model", family)
        recipe = [
            SmoothQuantModifier(),
            calipers.QuantizationModifier(scheme="W8A8_STATIC", ignore=HEADS),
        ]
        seen = calipers.measure(model, IDS, progress=False)
        calipers.oneshot(
            load_model(model), recipe, IDS, output_dir=tmp_path / "memory", progress=False
        )
        quantize(model, recipe, tmp_path / "disk", measurements=seen)
        one, other = (stored_tensors(tmp_path / name) for name in ("memory", "disk"))
        assert one.keys() == other.keys()
        for name in one:
            if name.endswith("input_scale"):
                torch.testing.assert_close(one[name].read(), other[name].read(), rtol=0.02, atol=0)
            else:
                assert torch.equal(one[name].read(), other[name].read()), name

    def test_what_does_not_follow_a_transform_is_told_before(self, tmp_path: Path) -> None:
        model = model_folder(tmp_path / "model")
        seen = calipers.measure(model, IDS, progress=False)
        quantization = calipers.QuantizationModifier(
            scheme="W8A8_STATIC", ignore=HEADS, activation_observer="histogram_mse"
        )
        told = r"do not tell what 14 tensors .* a transform changes them, .* Calibrate with data"
        with pytest.raises(ConfigurationError, match=told):
            quantize(
                model, [SmoothQuantModifier(), quantization], tmp_path / "out", measurements=seen
            )
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"smoothing_strength": 1.5}, "smoothing_strength must be less than or equal to 1"),
            ({"mappings": [["a", "b", "c"]]}, "a mapping is a pair"),
            ({"mappings": "q_proj"}, "must be a list of mappings"),
            ({"strength": 0.5}, "unknown key 'strength' in SmoothQuantModifier"),
            ({"calibration_function": print}, "calibration_function is a function"),
            ({"mappings": [[["re:.*q_proj"], "re:.*nowhere"]]}, "'re:.*nowhere' matches no module"),
            (
                {"mappings": [[["re:.*o_proj"], "re:.*input_layernorm"]]},
                "'re:.*o_proj' matches nothing that reads 're:.*input_layernorm'. What reads",
            ),
            (
                {"mappings": [[["re:.*o_proj"], "re:.*q_proj"]]},
                "The output of 'model.layers.0.self_attn.q_proj' cannot be divided: what reads its "
                "output is not known",
            ),
            (
                {"mappings": [[["lm_head"], "model.norm"]]},
                "The output of 'model.norm' cannot be divided: 'lm_head' shares its weight with "
                "'model.embed_tokens'",
            ),
        ],
    )
    def test_bad_ones_are_refused_before_anything_changes(
        self, options: dict[str, Any], told: str
    ) -> None:
        model = build("llama tied")
        before = Untouched(model)
        with pytest.raises((RecipeError, ConfigurationError), match=re.escape(told)):
            transformed(model, **options)
        before.check()

    def test_data_are_needed(self, tmp_path: Path) -> None:
        model = model_folder(tmp_path / "model")
        recipe = [SmoothQuantModifier(), calipers.QuantizationModifier(scheme="W8A8")]
        with pytest.raises(ConfigurationError, match="needs data for 14 tensors"):
            quantize(model, recipe, tmp_path / "out")


class TestWhatIsMeant:
    def test_readers_that_are_not_named_make_up_for_the_factors(self) -> None:
        model = build("qwen2-moe")
        before = logits_of(model)
        mapping = [[["re:.*experts.0.gate_proj"], "re:.*post_attention_layernorm"]]
        recipe = [
            SmoothQuantModifier(mappings=mapping),
            calipers.QuantizationModifier(
                targets=["re:.*experts.0.gate_proj"],
                weights={"num_bits": 8, "strategy": "channel"},
            ),
        ]
        calipers.oneshot(model, recipe, IDS, progress=False)
        torch.testing.assert_close(logits_of(model), before, rtol=1e-2, atol=2e-3)

    def test_what_is_ignored_stays(self) -> None:
        told = transformed(build("llama"), ignore=["re:.*layernorm"]).transforms
        assert {name.rpartition(".")[2] for name in told} == {"v_proj", "up_proj"}

    def test_norms_of_experts_stay_unless_they_are_named(self) -> None:
        recipe = [SmoothQuantModifier(), calipers.QuantizationModifier(scheme="W8A8")]
        result = calipers.oneshot(build("mixtral"), recipe, IDS, progress=False)
        assert "model.layers.0.post_attention_layernorm" not in result.transforms
        assert "model.layers.0.mlp.experts.0.up_proj" in result.transforms

    def test_what_cannot_be_folded_is_named(self) -> None:
        model = build("llama")
        model.config.clip_qkv = 1.0
        with pytest.warns(CalipersWarning, match=r"leaves .*v_proj.* values are clipped"):
            transformed(model)

    def test_a_factor_that_overflows_is_an_error(self) -> None:
        model = build("llama", torch.float16)
        with torch.no_grad():
            model.get_submodule(UP).weight[3] = 6e4
            model.get_submodule(UP.replace("up", "down")).weight[:, 3] = 6e4
            model.get_submodule(UP.replace("up", "gate")).weight[3] = 1e-7
        before = Untouched(model)
        with pytest.raises(TensorValueError, match=r"overflows float16 .* Choose a lower strength"):
            transformed(model, smoothing_strength=1.0, mappings=[[["re:.*down_proj"], UP]])
        before.check()


def test_massive_activations_become_harmless() -> None:
    """The increase that static int8 activations cause falls to less than a quarter."""
    texts = [
        [BOS, *torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(i)).tolist()]
        for i in range(50, 58)
    ]

    @torch.no_grad()
    def words(model: Any) -> Tensor:
        return functional.log_softmax(model(torch.tensor(texts), use_cache=False).logits, -1)

    expected = words(massive_llama())
    lost = []
    for steps in ([], [SmoothQuantModifier()]):
        model = massive_llama()
        quantization = calipers.QuantizationModifier(scheme="W8A8_STATIC", ignore=["lm_head"])
        calipers.oneshot(model, [*steps, quantization], samples(), progress=False)
        lost.append(float((expected.exp() * (expected - words(model))).sum(-1).mean()))
    assert lost[1] < lost[0] / 20
