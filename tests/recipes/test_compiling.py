from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from models import small_llama
from transformers import OPTConfig, OPTForCausalLM

from calipers.errors import LayoutError, RecipeError
from calipers.recipes import load_recipe
from calipers.steps import IMatrixGatherer, QuantizationModifier

INT8 = {"num_bits": 8, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float"}


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return small_llama()


class TestClaims:
    def test_one_tensor_twice(self, llama: torch.nn.Module) -> None:
        recipe = load_recipe(
            "a_stage: {modifiers: {QuantizationModifier: {scheme: W8A8}}}\n"
            "b_stage: {modifiers: {QuantizationModifier: {scheme: FP8, targets: lm_head}}}"
        )
        with pytest.raises(RecipeError) as caught:
            recipe.compile(llama)
        assert str(caught.value).startswith(
            "Both QuantizationModifier (number 1 of stage 'a') and QuantizationModifier (number 1 "
            "of stage 'b') quantize 'lm_head.weight'."
        )
        assert isinstance(caught.value, RecipeError)

    def test_weights_and_inputs_by_two_modifiers(self, llama: torch.nn.Module) -> None:
        weights = QuantizationModifier(weights=INT8)
        inputs = QuantizationModifier(targets="re:.*mlp.*", input_activations=FP8)
        plan = load_recipe([inputs, weights]).compile(llama)
        by_name = {module.name: module for module in plan.modules}
        both = by_name["model.layers.0.mlp.up_proj"]
        assert [tensor.base_name for tensor in both.tensors] == ["weight", "input"]
        assert both.scheme.weights.type == "int"
        assert both.scheme.input_activations.type == "float"
        assert both.scheme.targets == ["model.layers.0.mlp.up_proj"]
        assert by_name["lm_head"].scheme.input_activations is None
        assert [m.name for m in plan.modules] == [
            name for name, m in llama.named_modules() if isinstance(m, torch.nn.Linear)
        ]

    def test_targets_that_agree_stay(self, llama: torch.nn.Module) -> None:
        two = [QuantizationModifier(weights=INT8), QuantizationModifier(input_activations=FP8)]
        plan = load_recipe(two).compile(llama)
        assert {tuple(module.scheme.targets) for module in plan.modules} == {("Linear",)}

    def test_the_cache_beside_linear_modules(self, llama: torch.nn.Module) -> None:
        plan = load_recipe(QuantizationModifier(scheme="FP8", kv_cache_scheme=FP8)).compile(llama)
        names = [module.name for module in plan.modules]
        assert names[:2] == ["model.layers.0.self_attn", "model.layers.0.self_attn.q_proj"]
        assert plan.modules[0].kind == "kv_cache"
        assert len(names) == 17

    def test_states_of_unknown_shape(self) -> None:
        """This is said before the data runs, not after."""
        sizes = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "vocab_size": 32}
        config = OPTConfig(**sizes, num_attention_heads=2, word_embed_proj_dim=32)
        message = (
            "Module 'model.decoder.layers.0.self_attn', k/v: compressed-tensors does not find the "
            "shape of the attention states of OPTForCausalLM: its config does not tell "
            "num_key_value_heads. Its queries, keys and values cannot be quantized."
        )
        with pytest.raises(RecipeError, match=f"^{re.escape(message)}$"):
            load_recipe(QuantizationModifier(kv_cache_scheme=FP8)).compile(OPTForCausalLM(config))

    def test_the_cache_twice(self, llama: torch.nn.Module) -> None:
        attention = QuantizationModifier(targets="LlamaAttention", input_activations=FP8)
        cache = QuantizationModifier(kv_cache_scheme=FP8)
        with pytest.raises(RecipeError, match=r"quantize 'model.layers.0.self_attn.k'"):
            load_recipe([attention, cache]).compile(llama)

    def test_the_cache_twice_by_one_modifier(self, llama: torch.nn.Module) -> None:
        both = {"targets": "LlamaAttention", "input_activations": FP8, "kv_cache_scheme": FP8}
        with pytest.raises(RecipeError, match=r"quantize 'model.layers.0.self_attn.k'"):
            load_recipe(QuantizationModifier(**both)).compile(llama)

    def test_gathered_modules(self, llama: torch.nn.Module) -> None:
        gatherers = [IMatrixGatherer(targets="lm_head"), IMatrixGatherer()]
        plan = load_recipe(gatherers).compile(llama)
        assert plan.modules == ()
        assert len(plan.measured) == 15
        assert list(plan.measured)[-1] == "lm_head"
        assert plan.needs_data


def compiled(model: torch.nn.Module, **given: Any) -> Any:
    return load_recipe(QuantizationModifier(**given)).compile(model)


class TestFit:
    def test_group_size(self, llama: torch.nn.Module) -> None:
        with pytest.raises(LayoutError) as caught:
            load_recipe("W4A16").compile(llama)
        lines = str(caught.value).splitlines()
        assert lines[0] == "The group or block size of the recipe does not divide 12 tensors:"
        assert lines[1] == (
            "  model.layers.0.self_attn.q_proj, weight: 64 is not divisible by 128. "
            "Group sizes that divide it: 16, 32, 64."
        )
        assert lines[6] == "  and 7 more"
        assert lines[7] == (
            "Sizes that fit every weight: group_size=64, group_size=32, group_size=16. Choose one, "
            "or ignore these modules."
        )
        assert caught.value.exit_code == 2

    def test_what_divides_is_taken(self, llama: torch.nn.Module) -> None:
        plan = load_recipe(QuantizationModifier(scheme="W4A16", targets="re:.*down_proj")).compile(
            llama
        )
        assert len(plan.modules) == 2

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"weights": {"num_bits": 4, "group_size": 48}}, "q_proj, weight: 64 .* by 48"),
            (
                {"input_activations": {"group_size": 48, "dynamic": True}},
                "q_proj, input: 64 is not divisible by 48",
            ),
            (
                {  # the weights fit: no other size of theirs helps
                    "weights": {"num_bits": 4, "group_size": 32},
                    "output_activations": {"group_size": 48},
                },
                r"(?s)q_proj, output: 64 is not divisible by 48\..*\nChoose another scheme, or",
            ),
            (
                {"targets": "re:.*k_proj", "output_activations": {"group_size": 64}},
                "k_proj, output: 32 is not divisible by 64",
            ),
            (
                {"weights": {"strategy": "block", "block_structure": [16, 128]}},
                "q_proj, weight: 64 is not divisible by 128",
            ),
        ],
    )
    def test_other_tensors(self, llama: torch.nn.Module, given: dict[str, Any], text: str) -> None:
        with pytest.raises(LayoutError, match=text):
            compiled(llama, **given)

    def test_rows_of_blocks_need_not_divide(self, llama: torch.nn.Module) -> None:
        blocks = {"strategy": "block", "block_structure": [60, 64]}
        assert len(compiled(llama, weights=blocks).modules) == 15

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            (
                {"weights": {"strategy": "token", "dynamic": True}},
                "Module 'model.layers.0.self_attn.q_proj', weight: a weight does not change",
            ),
            (
                {"weights": {"num_bits": 4, "group_size": 32, "actorder": "weight"}},
                "q_proj', weight: 'actorder' is for GPTQ",
            ),
            (
                {"weights": {"strategy": "attn_head"}},
                "q_proj', weight: Strategy 'attn_head' cannot be applied to 'weight'. Allowed",
            ),
            (
                {"input_activations": {"strategy": "attn_head"}},
                "q_proj', input: Strategy 'attn_head' cannot be applied to 'input'",
            ),
            (
                {"targets": "Embedding", "scheme": "FP8"},
                "Module 'model.embed_tokens', input: the input of an Embedding is token ids",
            ),
            (
                {"input_activations": {"group_size": 32}, "input_observer": "percentile"},
                "q_proj', input: .*values are counted per tensor or per head",
            ),
            (
                {"input_activations": FP8, "input_observer": "optimal"},
                "q_proj', input: ",
            ),
            (
                {"kv_cache_scheme": {"group_size": 32}},
                "self_attn', k: Strategy 'group' cannot be applied to 'k'",
            ),
        ],
    )
    def test_unfit(self, llama: torch.nn.Module, given: dict[str, Any], text: str) -> None:
        with pytest.raises(RecipeError, match=text):
            compiled(llama, **given)

    def test_quantized_already(self) -> None:
        model = small_llama()
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs())
        model.lm_head.quantization_scheme = scheme
        with pytest.raises(RecipeError, match="'lm_head' is already quantized"):
            compiled(model, scheme="FP8")
        assert len(compiled(model, scheme="FP8", ignore="lm_head").modules) == 14

    def test_nothing_to_quantize(self) -> None:
        model = torch.nn.Sequential(torch.nn.ReLU())
        with pytest.raises(RecipeError) as caught:
            compiled(model, scheme="FP8", unmatched="ignore")
        assert str(caught.value) == (
            "The recipe quantizes nothing in Sequential: no module that can be quantized matches. "
            "Its classes: ReLU, Sequential. Some of its names: 0."
        )

    def test_tied_embeddings(self) -> None:
        model = small_llama(tie_word_embeddings=True)
        plan = compiled(model, targets=["Linear", "Embedding"], weights=INT8)
        names = [module.name for module in plan.modules]
        assert names[0] == "model.embed_tokens"
        assert names[-1] == "lm_head"

    def test_the_model_is_only_looked_at(self, llama: torch.nn.Module) -> None:
        before = {name: sorted(vars(module)) for name, module in llama.named_modules()}
        compiled(llama, scheme="FP8", kv_cache_scheme=FP8)
        assert {name: sorted(vars(module)) for name, module in llama.named_modules()} == before
