from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme
from compressed_tensors.quantization.utils import KV_CACHE_TARGETS
from models import small_llama, small_mixtral
from pydantic import ValidationError

from calipers import oneshot
from calipers.errors import CalipersWarning, RecipeError
from calipers.observers import Observer
from calipers.steps import QuantizationModifier

INT4 = {"num_bits": 4, "group_size": 32}
FP8 = {"num_bits": 8, "type": "float"}


@pytest.fixture(scope="module")
def llama() -> torch.nn.Module:
    return small_llama()


def planned(modifier: QuantizationModifier, model: torch.nn.Module) -> dict[str, Any]:
    return {module.name: module for module in modifier.plan(model, "").modules}


class TestSchemes:
    @pytest.mark.parametrize("name", sorted(PRESET_SCHEMES))
    def test_every_preset(self, name: str) -> None:
        (scheme,) = QuantizationModifier(scheme=name.lower()).schemes.values()
        expected = preset_name_to_scheme(name, ["Linear"])
        for field in ("weights", "input_activations", "output_activations"):
            ours, theirs = getattr(scheme, field), getattr(expected, field)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert ours.model_copy(update={"observer": theirs.observer}) == theirs
        assert scheme.targets == ["Linear"]

    def test_presets_with_their_targets(self, llama: torch.nn.Module) -> None:
        modifier = QuantizationModifier(
            scheme={"W8A8": "re:.*self_attn.*", "fp8_dynamic": ["Linear"]}, ignore="lm_head"
        )
        found = planned(modifier, llama)
        assert set(modifier.schemes) == {"group_0", "group_1"}
        assert found["model.layers.1.self_attn.q_proj"].scheme.weights.type == "int"
        assert found["model.layers.1.mlp.up_proj"].scheme.weights.type == "float"
        assert len(found) == 14

    def test_a_name_wins_over_a_pattern_and_a_pattern_over_a_class(
        self, llama: torch.nn.Module
    ) -> None:
        bits = {"Linear": 8, "re:.*q_proj": 4, "model.layers.0.self_attn.q_proj": 2}
        groups = {
            f"{n}bit": {"targets": [target], "weights": {"num_bits": n, "strategy": "channel"}}
            for target, n in bits.items()
        }
        found = planned(QuantizationModifier(config_groups=groups), llama)
        assert found["model.layers.0.self_attn.q_proj"].scheme.weights.num_bits == 2
        assert found["model.layers.1.self_attn.q_proj"].scheme.weights.num_bits == 4
        assert found["lm_head"].scheme.weights.num_bits == 8

    def test_three_spellings_of_one_scheme(self) -> None:
        spelled = [
            QuantizationModifier(weights=INT4, input_activations=FP8),
            QuantizationModifier(scheme={"weights": INT4, "input_activations": FP8}),
            QuantizationModifier(
                config_groups={
                    "group_0": {"targets": "Linear", "weights": INT4, "input_activations": FP8}
                }
            ),
        ]
        first, *others = [modifier.schemes for modifier in spelled]
        assert first["group_0"].weights.group_size == 32
        assert all(other == first for other in others)

    def test_a_preset_may_head_a_group(self) -> None:
        modifier = QuantizationModifier(config_groups={"W4A16": ["Linear"]})
        assert modifier.schemes["W4A16"].weights.group_size == 128

    def test_what_is_unquantized_is_left_alone(self, llama: torch.nn.Module) -> None:
        modifier = QuantizationModifier(scheme={"UNQUANTIZED": "lm_head", "FP8": "Linear"})
        assert "lm_head" not in planned(modifier, llama)
        assert len(planned(modifier, llama)) == 14

    def test_objects_of_the_user_stay_as_they_are(self, llama: torch.nn.Module) -> None:
        args = QuantizationArgs(**INT4)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        before = copy.deepcopy((args, scheme))
        for modifier in (
            QuantizationModifier(weights=args, weight_observer={"name": "mse", "grid": 50}),
            QuantizationModifier(config_groups={"a": scheme}, weight_observer="mse"),
        ):
            used = planned(modifier, llama)["lm_head"].scheme.weights
            assert used.observer == "mse"
            used.num_bits = 2
            assert planned(modifier, llama)["lm_head"].scheme.weights.num_bits == 4
        args.num_bits = 3
        assert modifier.schemes["a"].weights.num_bits == 4
        args.num_bits = 4
        assert (args, scheme) == before

    def test_null_is_nothing(self) -> None:
        fields = QuantizationModifier.model_fields
        nothing = {name: None for name in fields if name not in ("targets", "unmatched")}
        given = QuantizationModifier(**{**nothing, "scheme": "FP8"})
        assert given == QuantizationModifier(scheme="FP8")
        with pytest.raises(RecipeError, match="does not say how"):
            QuantizationModifier(**nothing)

    def test_it_is_frozen(self) -> None:
        modifier = QuantizationModifier(scheme="FP8")
        with pytest.raises(ValidationError, match="frozen"):
            modifier.scheme = "W8A8"


class TestObservers:
    def test_defaults_are_named(self) -> None:
        (scheme,) = QuantizationModifier(
            weights=INT4, input_activations=FP8, output_activations=FP8
        ).schemes.values()
        assert scheme.weights.observer == "memoryless_minmax"
        assert scheme.input_activations.observer == "static_minmax"
        assert scheme.output_activations.observer == "static_minmax"

    def test_dynamic_arguments_name_none(self) -> None:
        (scheme,) = QuantizationModifier(scheme="W8A8").schemes.values()
        assert scheme.input_activations.observer is None

    @pytest.mark.parametrize(
        "given",
        [
            {"weight_observer": {"name": "mse", "grid": 50}},
            {"observer": {"weights": {"name": "mse", "grid": 50}}},
        ],
    )
    def test_options(self, given: dict[str, Any]) -> None:
        (scheme,) = QuantizationModifier(scheme="FP8", **given).schemes.values()
        assert scheme.weights.observer == "mse"
        assert scheme.weights.observer_kwargs == {"grid": 50}
        assert scheme.input_activations.observer == "static_minmax"

    def test_activation_observer_is_for_inputs_and_outputs(self) -> None:
        (scheme,) = QuantizationModifier(
            input_activations=FP8,
            output_activations=FP8,
            activation_observer={"name": "mse", "averaging_constant": 0.01},
        ).schemes.values()
        for args in (scheme.input_activations, scheme.output_activations):
            assert args.observer == "mse"
            assert args.observer_kwargs == {"averaging_constant": 0.01}

    def test_an_observer_of_ones_own_takes_any_option(self, llama: torch.nn.Module) -> None:
        @Observer.register("own_of_modifier_tests")
        class Own(Observer):
            def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
                self.min_vals, self.max_vals = observed.amin((0, -1)), observed.amax((0, -1))

        choice = {"name": Own.registered_name(), "anything": 1}
        modifier = QuantizationModifier(scheme="FP8_DYNAMIC", weight_observer=choice)
        args = planned(modifier, llama)["lm_head"].scheme.weights
        assert args.observer_kwargs == {"anything": 1}
        again = QuantizationModifier(scheme="FP8_DYNAMIC", weight_observer=modifier.weight_observer)
        assert again == modifier

    def test_an_observer_with_nothing_to_watch_is_told(self, llama: torch.nn.Module) -> None:
        modifier = QuantizationModifier(scheme="W8A8", activation_observer="minmax")
        with pytest.warns(CalipersWarning, match="activation_observer has no effect"):
            modifier.plan(llama, "")


class TestMatching:
    def test_attention_by_its_class(self, llama: torch.nn.Module) -> None:
        heads = {**FP8, "strategy": "attn_head"}
        modifier = QuantizationModifier(targets="LlamaAttention", input_activations=heads)
        found = modifier.plan(llama, "").modules
        assert [(m.name, m.kind) for m in found] == [
            (f"model.layers.{i}.self_attn", "attention") for i in (0, 1)
        ]
        assert [t.base_name for t in found[0].tensors] == ["q", "k", "v"]

    def test_attention_that_a_pattern_matches_with_its_parts_is_not_meant(
        self, llama: torch.nn.Module
    ) -> None:
        found = planned(QuantizationModifier(targets="re:.*self_attn", scheme="FP8"), llama)
        assert {module.kind for module in found.values()} == {"linear"}
        assert len(found) == 8

    def test_attention_that_one_of_several_targets_means(self, llama: torch.nn.Module) -> None:
        modifier = QuantizationModifier(
            targets=["LlamaAttention", "re:.*self_attn"], input_activations=FP8
        )
        kinds = [module.kind for module in modifier.plan(llama, "").modules]
        assert kinds.count("attention") == 2
        assert kinds.count("linear") == 8

    def test_weights_of_attention_are_refused(self, llama: torch.nn.Module) -> None:
        modifier = QuantizationModifier(targets="LlamaAttention", scheme="FP8")
        with pytest.raises(RecipeError, match="target its Linear modules"):
            modifier.plan(llama, "")

    def test_cache(self, llama: torch.nn.Module) -> None:
        found = QuantizationModifier(kv_cache_scheme=FP8).plan(llama, "").modules
        assert [(m.name, m.kind) for m in found] == [
            (f"model.layers.{i}.self_attn", "kv_cache") for i in (0, 1)
        ]
        assert found[0].scheme.targets == KV_CACHE_TARGETS
        assert [t.base_name for t in found[0].tensors] == ["k", "v"]

    def test_a_model_without_cache(self) -> None:
        with pytest.raises(RecipeError, match="Sequential has no attention module"):
            QuantizationModifier(kv_cache_scheme=FP8).plan(torch.nn.Sequential(), "")

    def test_norms_that_a_pattern_matches_too_are_passed_over(self, llama: torch.nn.Module) -> None:
        found = planned(QuantizationModifier(targets="re:model.layers.0.*", scheme="FP8"), llama)
        assert len(found) == 7

    def test_norms_alone_are_an_error(self, llama: torch.nn.Module) -> None:
        modifier = QuantizationModifier(targets=["Linear", "re:.*norm"], scheme="FP8")
        with pytest.raises(RecipeError, match=r"'re:\.\*norm' matches only LlamaRMSNorm"):
            modifier.plan(llama, "")

    def test_embeddings(self) -> None:
        model = small_llama(tie_word_embeddings=True)
        channel = {"num_bits": 8, "strategy": "channel"}
        found = planned(QuantizationModifier(targets=["Embedding"], weights=channel), model)
        assert list(found) == ["model.embed_tokens"]

    def test_experts_of_a_fused_layer_are_not_linear(self) -> None:
        found = planned(QuantizationModifier(scheme="FP8"), small_mixtral())
        assert not any("experts" in name for name in found)
        assert "lm_head" in found

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"targets": "Lineer"}, "targets: 'Lineer' matches no module .* mean 'Linear'"),
            ({"targets": ["Linear", "re:.*w1"]}, r"targets: 're:\.\*w1' matches no module"),
            ({"ignore": "lm_hed"}, "ignore: 'lm_hed' matches no module .* mean 'lm_head'"),
            ({"ignore": "q_proj"}, r"given in full, or as 're:\.\*q_proj'"),
        ],
    )
    def test_what_matches_nothing_is_an_error(
        self, llama: torch.nn.Module, given: dict[str, Any], text: str
    ) -> None:
        with pytest.raises(RecipeError, match=text):
            QuantizationModifier(scheme="FP8", **given).plan(llama, "")

    def test_or_a_warning_or_nothing(self, llama: torch.nn.Module) -> None:
        given = {"scheme": "FP8", "ignore": ["score"]}
        with pytest.warns(CalipersWarning, match="'score' matches no module"):
            warned = QuantizationModifier(**given, unmatched="warn").plan(llama, "").modules
        silent = QuantizationModifier(**given, unmatched="ignore").plan(llama, "").modules
        assert len(warned) == len(silent) == 15


@pytest.mark.parametrize(
    "given",
    [
        {"scheme": "FP8", "ignore": ["lm_head"]},
        {"scheme": {"W8A8": ["re:.*self_attn"], "FP8": ["Linear", "lm_head"]}},
        {"targets": ["re:.*self_attn$"], "input_activations": FP8},
        {"targets": ["re:model.*"], "ignore": "Embedding", "scheme": "FP8_DYNAMIC"},
        {"targets": ["re:.*0.mlp.*", "LlamaAttention"], "input_activations": FP8},
        {"scheme": "FP8", "kv_cache_scheme": FP8},
    ],
    ids=str,
)
def test_modules_are_those_of_compressed_tensors(given: dict[str, Any]) -> None:
    model = small_llama()
    modifier = QuantizationModifier(**given)
    ours = {module.name: module.scheme for module in modifier.plan(model, "").modules}
    config = QuantizationConfig(
        config_groups=modifier.schemes,
        ignore=list(modifier.ignore),
        kv_cache_scheme=modifier.kv_cache_scheme,
    )
    apply_quantization_config(model, config)
    theirs = {
        name: module.quantization_scheme
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    assert len(ours) > 1
    assert ours == theirs


class TestContradictions:
    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({}, "does not say how to quantize"),
            ({"scheme": "FP8", "config_groups": {"FP8": ["Linear"]}}, "'scheme' and 'config_gr"),
            ({"scheme": "FP8", "weights": INT4}, "'scheme' and 'weights'"),
            ({"scheme": {"FP8": ["Linear"]}, "targets": "lm_head"}, "name their own targets"),
            ({"config_groups": {"a": {"weights": INT4}}}, "config_groups.a needs the key 'targets"),
            ({"config_groups": {}}, "config_groups: must map names of groups"),
            (
                {"scheme": "FP8", "weight_observer": "mse", "observer": {"weights": "mse"}},
                "'weight_observer' and 'observer.weights': both choose",
            ),
            (
                {"scheme": "FP8", "input_observer": "mse", "activation_observer": "minmax"},
                "'input_observer' and 'activation_observer'",
            ),
            (
                {"weights": {**INT4, "observer": "mse"}, "weight_observer": "minmax"},
                "weight_observer chooses 'minmax', but 'weights' names the observer 'mse' itself",
            ),
            ({"scheme": "FP8", "observer": "mse"}, "must say for which tensors"),
            ({"scheme": "FP9"}, "scheme: unknown scheme 'FP9'. Did you mean 'FP8'"),
            ({"scheme": {"FP9": "Linear"}}, "unknown scheme 'FP9'"),
            ({"scheme": {"FP8": []}}, "a preset needs its targets"),
            (
                {"scheme": {"wieghts": INT4}},
                "'wieghts' in QuantizationModifier.scheme. .*'weights'",
            ),
            ({"scheme": 8}, "scheme: must be a mapping"),
            ({"weights": 8}, r"weights: must be a mapping such as \{num_bits: 8\}, got 8"),
            ({"weights": {"num_bits": 12}}, "weights: int with 12 bits is not a supported format"),
            ({"weights": {"num_bits": 16, "type": "float"}}, "float with 16 bits is not a supp"),
            ({"weights": {"type": "flot"}}, "unknown type 'flot'. Did you mean 'float'"),
            ({"weights": {"strategy": "grop"}}, "unknown strategy 'grop'. Did you mean 'group'"),
            ({"weights": {"group_size": "x"}}, "group_size must be an integer, got 'x'"),
            ({"weights": {"strategy": "group"}}, "requires group_size"),
            ({"input_activations": {"strategy": "channel"}}, "channel strategy is not supported"),
            ({"input_activations": {"strategy": "token"}}, "Cannot perform static token"),
            ({"scheme": "FP8", "weight_observer": "mes"}, "unknown observer 'mes'. Did you mean"),
            ({"scheme": "FP8", "weight_observer": {"grid": 3}}, "mapping with the key 'name'"),
            (
                {"scheme": "FP8", "weight_observer": {"name": "mse", "gird": 3}},
                "Unknown option 'gird' for observer 'mse'. Did you mean 'grid'",
            ),
            ({"scheme": "FP8", "weight_observer": {"name": "mse", "grid": -3}}, "grid must be > 0"),
            ({"scheme": "FP8", "unmatched": "no"}, "unmatched must be 'error', 'warn' or 'ignore'"),
            ({"scheme": "FP8", "targets": [3]}, "targets: .* must be text, got 3"),
            ({"scheme": "FP8", "targets": 3}, "targets: must be a name, a class, .* got 3"),
            ({"scheme": "FP8", "targets": []}, "targets is empty"),
            ({"scheme": {"FP8": "Linear", "W8A8": "Linear"}}, "two schemes for the .* 'Linear'"),
            (
                {"weights": {**INT4, "observer": "static_minmax", "observer_kwargs": {"grid": 1}}},
                "weights: Unknown option 'grid' for observer 'static_minmax'",
            ),
            ({"scheme": "FP8", "targtes": []}, "unknown key 'targtes' .* Did you mean 'targets'"),
            ({"scheme": "FP8", "bypass_divisibility_checks": True}, "cannot be written"),
        ],
    )
    def test_a_clear_error(self, given: dict[str, Any], text: str) -> None:
        with pytest.raises(RecipeError, match=text) as caught:
            QuantizationModifier(**given)
        assert caught.value.exit_code == 2
        assert "pydantic" not in str(caught.value)
        assert "\n" not in str(caught.value)


PEER = [
    {"scheme": "W4A16"},
    {"scheme": "NVFP4", "weight_observer": "memoryless_mse"},
    {"scheme": {"FP8": ["re:.*mlp.*"], "W8A8": ["re:.*self_attn.*"]}},
    {"scheme": "FP8", "observer": {"weights": "mse", "input": "mse"}},
    {"config_groups": {"a": {"targets": ["Linear"], "weights": INT4}}, "weight_observer": "mse"},
]


@pytest.mark.parametrize("given", PEER, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_schemes_are_those_of_the_peer(given: dict[str, Any]) -> None:
    peer = pytest.importorskip("llmcompressor.modifiers.quantization")
    theirs = peer.QuantizationModifier(**copy.deepcopy(given)).resolved_config.config_groups
    ours = QuantizationModifier(**given).schemes
    assert {name: scheme.model_dump() for name, scheme in ours.items()} == {
        name: scheme.model_dump() for name, scheme in theirs.items()
    }


def test_weights_that_engines_fuse_share_a_global_scale() -> None:
    """The largest value of all of them becomes the largest of FP4 times the largest of FP8."""
    model = oneshot(small_llama(), "NVFP4A16").model
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for fused in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        ):
            largest = max(float(module.weight.detach().abs().max()) for module in fused)
            found = [float(module.weight_global_scale.detach()) for module in fused]
            assert found == pytest.approx([6 * 448 / largest] * len(fused))
