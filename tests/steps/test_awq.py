"""AWQ: its recipes, the strength it chooses, and what it makes better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import Untouched, build, logits_of
from quantizing import HEADS, IDS, model_folder, quantize
from torch import Tensor

import calipers
from calipers import AWQModifier, QuantizationModifier
from calipers.checkpoint.headers import stored_tensors
from calipers.checkpoint.reader import load_model
from calipers.errors import RecipeError
from calipers.recipes import load_recipe

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

# As the documentation of llm-compressor describes it: a transform beside what quantizes.
RECIPE = """
quant_stage:
  quant_modifiers:
    AWQModifier:
      mappings:
        - smooth_layer: "re:.*input_layernorm"
          balance_layers: ["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"]
        - smooth_layer: "re:.*v_proj"
          balance_layers: ["re:.*o_proj"]
        - smooth_layer: "re:.*post_attention_layernorm"
          balance_layers: ["re:.*gate_proj", "re:.*up_proj"]
        - smooth_layer: "re:.*up_proj"
          balance_layers: ["re:.*down_proj"]
      duo_scaling: both
      n_grid: 8
      offload_device: null
    QuantizationModifier:
      targets: ["Linear"]
      ignore: ["lm_head"]
      scheme: W4A16_ASYM
"""
# As its earlier versions had it: one modifier for both.
EARLIER = """
modifiers:
  AWQModifier: {targets: [Linear], ignore: [lm_head], scheme: W4A16_ASYM, duo_scaling: false}
"""
SCHEME = {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}
W4 = {"config_groups": {"g": {"targets": ["Linear"], "weights": SCHEME}}, "ignore": HEADS}
NORM = "model.layers.0.input_layernorm"
READERS = [f"model.layers.0.self_attn.{x}_proj" for x in "qkv"]


def uneven(family: str = "llama", **changes: Any) -> Any:
    """A model with channels of very different sizes, as real ones have."""
    model: Any = build(family, **changes)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) ** 3 * 4 + 0.05)
    return model


def lost(model: Any, recipe: Any, expected: Tensor) -> float:
    calipers.oneshot(model, recipe, IDS, progress=False)
    return float((logits_of(model) - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3-moe"])
def test_quantized_weights_lose_less(family: str) -> None:
    expected = logits_of(uneven(family))
    quantization = QuantizationModifier(**W4)
    plain = lost(uneven(family), [quantization], expected)
    scaled = lost(uneven(family), [AWQModifier(), quantization], expected)
    assert scaled < 0.97 * plain


def test_the_strength_is_that_of_the_outputs_that_lose_least() -> None:
    """Against candidates that are run: quantized, divided again, and multiplied with inputs."""
    model = uneven()
    seen: list[Tensor] = []
    handle = model.get_submodule(NORM).register_forward_hook(lambda _m, _a, out: seen.append(out))
    with torch.no_grad():
        model(IDS, use_cache=False)
    handle.remove()
    x = seen[0].detach().flatten(0, 1).double()
    weights = [model.get_submodule(name).weight.detach().clone() for name in READERS]
    magnitude = x.square().mean(0).sqrt()

    def loss(ratio: float) -> float:
        factors = magnitude**ratio
        factors = factors / (factors.max() * factors.min()).sqrt()
        total = 0.0
        for weight in weights:
            groups = (weight.double() * factors).reshape(-1, 4, 32)
            low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
            low, high = low.clamp(max=0), high.clamp(min=0)
            scale = (high - low) / 15
            zero = (-8 - low / scale).round()
            codes = (groups / scale + zero).round().clamp(-8, 7)
            error = ((codes - zero) * scale).reshape(weight.shape) / factors - weight
            total += float((x.square().sum(0) * error.square()).sum())
        return total

    losses = {index / 9: loss(index / 9) for index in range(10)}
    step = AWQModifier(duo_scaling=False, n_grid=10)
    result = calipers.oneshot(model, [step, QuantizationModifier(**W4)], IDS, progress=False)
    told = result.transforms[NORM]
    best = min(losses, key=losses.__getitem__)
    assert told["strength"] == pytest.approx(best)
    assert told["loss"] == pytest.approx(losses[best] / losses[0.0], rel=1e-3)
    assert all(each.get("loss", 1) <= 1 for each in result.transforms.values())


class TestRecipes:
    @pytest.mark.parametrize("text", [RECIPE, EARLIER])
    def test_those_of_llm_compressor_run_unmodified(self, text: str, tmp_path: Path) -> None:
        model = uneven()
        expected = logits_of(model)
        result = calipers.oneshot(model, text, IDS, output_dir=tmp_path / "out", progress=False)
        assert len(result.transforms) == 8
        assert len(result.errors) == 14
        assert (logits_of(model) - expected).norm() < 0.7 * expected.norm()
        assert load_recipe(result.recipe.to_yaml()) == result.recipe

    @pytest.mark.parametrize("observer", ["memoryless_minmax", "optimal"])
    def test_from_disk_to_disk(self, tmp_path: Path, observer: str) -> None:
        model = model_folder(tmp_path / "model", dtype=torch.float32)
        seen = calipers.measure(model, IDS, progress=False)
        recipe = [AWQModifier(n_grid=6), QuantizationModifier(**W4, weight_observer=observer)]
        out = tmp_path / "memory"
        here = calipers.oneshot(load_model(model), recipe, IDS, output_dir=out, progress=False)
        there = quantize(model, recipe, tmp_path / "disk", measurements=seen)
        chosen = [
            {name: each["strength"] for name, each in result.transforms.items()}
            for result in (here, there)
        ]
        assert chosen[0] == chosen[1]
        one, other = (stored_tensors(tmp_path / name) for name in ("memory", "disk"))
        for name in (n for n in one if n.endswith(("norm.weight", "weight_scale"))):
            torch.testing.assert_close(one[name].read(), other[name].read(), rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize(
        ("steps", "told"),
        [
            ([AWQModifier(), QuantizationModifier(
                targets=["re:.*q_proj"], weights={"num_bits": 8, "strategy": "tensor"},
            )], "duo_scaling is true, but .*q_proj' has one scale for the whole"),
            ([AWQModifier()], "AWQModifier finds no quantized weight for whose sake"),
        ],
    )  # fmt: skip
    def test_bad_ones_are_refused_before_anything_changes(self, steps: Any, told: str) -> None:
        model = build("llama")
        before = Untouched(model)
        with pytest.raises(RecipeError, match=told):
            calipers.oneshot(model, steps, IDS, progress=False)
        before.check()

    def test_two_transforms_follow_each_other(self) -> None:
        """What was measured once is divided by the factors of the first."""
        model = uneven()
        expected = logits_of(model)
        steps = [calipers.SmoothQuantModifier(), AWQModifier(n_grid=4)]
        fine = {"num_bits": 8, "strategy": "channel"}
        quantization = QuantizationModifier(targets="Linear", ignore=HEADS, weights=fine)
        assert lost(model, [*steps, quantization], expected) < 0.02
