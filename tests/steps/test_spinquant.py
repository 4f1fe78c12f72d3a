"""Rotations: what they leave unchanged, what they make better, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SIZES, Untouched, build, logits_of
from models import random_model
from quantizing import HEADS, IDS, both, model_folder
from transformers import Gemma2Config, OPTConfig

import calipers
from calipers import QuantizationModifier, SpinQuantModifier
from calipers.errors import ConfigurationError, RecipeError
from calipers.recipes import load_recipe
from calipers.solvers.rotations import rotation
from calipers.topology.experts import unfuse_experts

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")

# As the documentation of llm-compressor describes it.
RECIPE = """
quant_stage:
  quant_modifiers:
    SpinQuantModifier:
      rotations: [R1, R2]
      transform_type: hadamard
    QuantizationModifier:
      targets: Linear
      scheme: W8A16
      ignore: [lm_head]
"""
FINE = {"num_bits": 8, "strategy": "channel"}


def uneven(family: str = "llama", **changes: Any) -> Any:
    model: Any = build(family, **changes)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.ndim == 1:
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model


@pytest.mark.parametrize("size", [2, 12, 28, 36, 64, 288, 576, 768])
@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard", "random-matrix"])
def test_rotations_are_orthogonal(kind: Any, size: int) -> None:
    matrix = rotation(kind, size, 0, "it")
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    assert torch.equal(matrix, rotation(kind, size, 0, "it"))
    if kind != "random-matrix":
        assert matrix.abs().unique().numel() == 1


@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("llama", {}, {}),
        ("llama", {}, {"transform_type": "random-matrix"}),
        ("llama", {}, {"transform_type": "random-hadamard", "transform_block_size": 32}),
        ("mistral", {}, {"rotations": ["r1"]}),
        ("qwen2", {"tie_word_embeddings": False}, {}),  # with biases
        ("qwen2", {}, {"rotations": "R2"}),
        ("mixtral", {}, {}),
        ("qwen3-moe", {"tie_word_embeddings": False}, {}),
    ],
)
def test_the_model_computes_the_same(
    family: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    model = uneven(family, **changes)
    unfuse_experts(model)
    expected = logits_of(model)
    calipers.oneshot(model, [SpinQuantModifier(**options)], progress=False)
    assert not torch.equal(logits_of(model), expected)
    torch.testing.assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-5)


def test_outliers_are_spread() -> None:
    """A few large weights cost others their precision; rotated, they cost hardly any."""

    def outlying() -> Any:
        model = uneven()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.up_proj.weight[:, 3] *= 30
                layer.self_attn.q_proj.weight[:, 3] *= 30
        return model

    expected, lost = logits_of(outlying()), []
    weights = {"num_bits": 4, "strategy": "channel"}
    quantization = QuantizationModifier(targets="Linear", ignore=HEADS, weights=weights)
    for steps in ([], [SpinQuantModifier()]):
        model = outlying()
        calipers.oneshot(model, [*steps, quantization], progress=False)
        lost.append(float((logits_of(model) - expected).norm()))
    assert lost[1] < lost[0] / 2


class TestRecipes:
    def test_one_of_llm_compressor_runs_unmodified(self, tmp_path: Path) -> None:
        model = model_folder(tmp_path / "model")
        both(model, RECIPE, tmp_path)  # in memory and from disk to disk, the same bytes
        assert load_recipe(load_recipe(RECIPE).to_yaml()) == load_recipe(RECIPE)

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"rotations": ["R1", "R4"]}, "R4 rotates the input of down_proj behind a product, wh"),
            ({"rotations": ["R3"]}, "which has to be done while the model runs"),
            ({"rotations": ["R9"]}, "unknown rotation"),
            ({"randomize": True}, "SpinQuantModifier.randomize is not supported"),
            ({"transform_block_size": 48}, "transform_block_size is 48, which does not divide"),
        ],
    )
    def test_bad_ones_are_refused_before_anything_changes(
        self, options: dict[str, Any], told: str
    ) -> None:
        model = build("llama")
        before = Untouched(model)
        with pytest.raises((RecipeError, ConfigurationError), match=re.escape(told)):
            calipers.oneshot(model, [SpinQuantModifier(**options)], progress=False)
        before.check()

    def test_quip_is_refused_with_the_reason(self) -> None:
        with pytest.raises(RecipeError, match=r"line 2: QuIPModifier rotates .* model runs"):
            load_recipe("modifiers:\n  QuIPModifier: {rotations: [v]}")

    @pytest.mark.parametrize(
        ("model", "told"),
        [
            (lambda: build("llama tied"), "'lm_head' shares its weight with 'model.embed_tokens'"),
            (
                lambda: random_model(Gemma2Config(**SIZES, head_dim=32)),
                "'model.layers.0.post_attention_layernorm': what reads this norm is not known, or",
            ),
            (
                lambda: random_model(OPTConfig(
                    vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=1,
                    num_attention_heads=4, word_embed_proj_dim=32,
                )),
                "what 'model.decoder.embed_positions' has to do with the residual stream is not",
            ),
            (
                lambda: build("llama", hidden_size=184, num_attention_heads=2, head_dim=32),
                "no Hadamard matrix of size 184 is known here, which the residual stream has",
            ),
            (lambda: build("mixtral"), "'model.layers.0.mlp.experts' stacks experts"),
        ],
    )  # fmt: skip
    def test_models_that_cannot_be_rotated(self, model: Any, told: str) -> None:
        with pytest.raises(ConfigurationError, match=re.escape(told)):
            calipers.oneshot(model(), [SpinQuantModifier()], progress=False)

    def test_measurements_of_the_model_as_it_was_do_not_follow(self, tmp_path: Path) -> None:
        model = model_folder(tmp_path / "model")
        seen = calipers.measure(model, IDS, progress=False)
        recipe = [SpinQuantModifier(), QuantizationModifier(
            targets="Linear", ignore=HEADS, weights={**FINE, "observer": "imatrix_mse"},
        )]  # fmt: skip
        with pytest.raises(ConfigurationError, match="a transform changes them"):
            calipers.quantize(model, recipe, seen, tmp_path / "out", progress=False)
