from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from models import small_llama
from seed_recipes import OVERVIEW

import calipers
from calipers.errors import RecipeError
from calipers.recipes import Recipe, load_recipe
from calipers.steps import IMatrixGatherer, QuantizationModifier

# The example of the observers' chapter, with what it has in comments.
CHAPTER = """\
modifiers:
  QuantizationModifier:
    targets: ["Linear"]
    scheme: FP8 # static activations
    activation_observer:
      name: mse
      averaging_constant: 0.01 # Parameters for the observer
"""

FROM_THE_PEER = """\
default_stage:
  default_modifiers:
    QuantizationModifier:
      config_groups:
        a:
          targets: [Linear]
          weights:
            num_bits: 4
            type: @QuantizationType [
              int]
            symmetric: false
            group_size: 32
            strategy: @QuantizationStrategy [
              group]
            block_structure: null
            dynamic: false
            zp_dtype: torch.int8
            observer: mse
            observer_kwargs: {}
          input_activations: null
      targets: [Linear]
      ignore: []
      weight_observer: mse
      bypass_divisibility_checks: false
      requires_calibration_data: false
""".replace("@", "!!python/object/apply:compressed_tensors.quantization.quant_args.")


class TestSeeds:
    def test_overview(self) -> None:
        recipe = load_recipe(OVERVIEW.format(modifier="QuantizationModifier"))
        (stage,) = recipe.stages
        (modifier,) = stage.modifiers
        assert stage.name == "quantization"
        assert isinstance(modifier, QuantizationModifier)
        assert modifier.weights is not None
        assert modifier.weights.observer_kwargs["maxshrink"] == 0.1
        rows = recipe.compile(small_llama()).rows()
        assert len(rows) == 15
        assert rows[0] == {
            "module": "model.layers.0.self_attn.q_proj",
            "tensor": "weight",
            "format": "int4",
            "strategy": "channel",
            "observer": "memoryless_mse(maxshrink=0.1, patience=10, grid=128.0, norm=2.0)",
            "data": "no",
        }

    def test_overview_as_it_stands(self) -> None:
        """tests/test_seed_examples.py carries it out."""
        plans = [
            load_recipe(OVERVIEW.format(modifier=name)).compile(small_llama())
            for name in ("GPTQModifier", "QuantizationModifier")
        ]
        gptq, plain = (plan.rows() for plan in plans)
        assert [{**row, "data": "no"} for row in gptq] == plain
        assert {row["data"] for row in gptq} == {"yes"}
        assert [plan.propagation for plan in plans] == ["both", "float"]

    def test_a_modifier_that_there_is_not(self) -> None:
        with pytest.raises(RecipeError) as caught:
            load_recipe(OVERVIEW.format(modifier="SparseGPTModifier"))
        assert str(caught.value) == (
            "recipe, line 3: Calipers does not have 'SparseGPTModifier'. Allowed: "
            "QuantizationModifier, GPTQModifier, AutoRoundModifier, IMatrixGatherer, "
            "TuningModifier, SmoothQuantModifier, AWQModifier, SpinQuantModifier, QuIPModifier."
        )

    def test_chapter(self) -> None:
        plan = load_recipe(CHAPTER).compile(small_llama())
        assert {(row["tensor"], row["observer"]) for row in plan.rows()} == {
            ("weight", "memoryless_minmax"),
            ("input", "mse(averaging_constant=0.01)"),
        }
        assert plan.needs_data

    def test_a_recipe_that_the_peer_wrote(self) -> None:
        (modifier,) = load_recipe(FROM_THE_PEER).modifiers
        group = QuantizationScheme(
            targets=["Linear"],
            weights=QuantizationArgs(num_bits=4, group_size=32, symmetric=False, observer="mse"),
        )
        assert modifier == QuantizationModifier(config_groups={"a": group}, weight_observer="mse")


class TestForms:
    EXPECTED = QuantizationModifier(scheme="FP8", ignore=["lm_head"])

    @pytest.mark.parametrize(
        "source",
        [
            EXPECTED,
            [EXPECTED],
            [[EXPECTED]],
            "modifiers: {QuantizationModifier: {scheme: FP8, ignore: lm_head}}",
            "quantization_modifiers: {QuantizationModifier: {scheme: FP8, ignore: [lm_head]}}",
            "modifiers:\n- QuantizationModifier:\n    scheme: fp8\n    ignore: [lm_head]",
            "default_stage: {modifiers: {QuantizationModifier: {scheme: FP8, ignore: lm_head}}}",
            '{"modifiers": {"QuantizationModifier": {"scheme": "FP8", "ignore": ["lm_head"]}}}',
            {"modifiers": {"QuantizationModifier": {"scheme": "FP8", "ignore": ["lm_head"]}}},
            {"modifiers": [EXPECTED]},
            {"modifiers": {"QuantizationModifier": EXPECTED}},
        ],
        ids=str,
    )
    def test_one_meaning(self, source: Any) -> None:
        recipe = load_recipe(source)
        assert recipe == load_recipe(self.EXPECTED)
        assert load_recipe(recipe) is recipe

    @pytest.mark.parametrize("suffix", ["yaml", "yml", "json"])
    def test_files(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"recipe.{suffix}"
        data = {"modifiers": {"QuantizationModifier": {"scheme": "FP8", "ignore": ["lm_head"]}}}
        path.write_text(json.dumps(data, indent=2))
        assert load_recipe(path) == load_recipe(str(path)) == load_recipe(self.EXPECTED)

    def test_several_stages_in_order(self) -> None:
        recipe = load_recipe(
            "b_stage:\n  b_modifiers:\n    IMatrixGatherer:\n"
            "a_stage:\n  x_modifiers: {QuantizationModifier: {scheme: FP8}}\n"
            "  y_modifiers: {IMatrixGatherer: {targets: lm_head}}\n"
        )
        assert [stage.name for stage in recipe.stages] == ["b", "a"]
        assert [type(modifier).__name__ for modifier in recipe.modifiers] == [
            "IMatrixGatherer",
            "QuantizationModifier",
            "IMatrixGatherer",
        ]

    def test_recipes_one_after_the_other(self) -> None:
        recipe = load_recipe([IMatrixGatherer(), [self.EXPECTED], "W8A8", load_recipe("W4A16")])
        assert [stage.name for stage in recipe.stages] == ["default", "default_2", "default_3"]
        assert [len(stage.modifiers) for stage in recipe.stages] == [2, 1, 1]

    def test_the_name_of_a_preset(self) -> None:
        (modifier,) = load_recipe("w4a16").modifiers
        assert modifier == QuantizationModifier(
            scheme="W4A16", ignore=["lm_head"], unmatched="ignore"
        )

    def test_public_names(self) -> None:
        assert calipers.load_recipe is load_recipe
        assert calipers.Recipe is Recipe
        assert calipers.QuantizationModifier is QuantizationModifier
        assert calipers.IMatrixGatherer is IMatrixGatherer


ASYMMETRIC = {"num_bits": 4, "group_size": 32, "symmetric": False}
MX = {"num_bits": 8, "type": "float", "group_size": 32, "scale_dtype": "uint8", "zp_dtype": "uint8"}
HEADS = {"num_bits": 8, "type": "float", "strategy": "attn_head"}


@pytest.mark.parametrize(
    "source",
    [
        "W4A16",
        OVERVIEW.format(modifier="QuantizationModifier"),
        CHAPTER,
        FROM_THE_PEER,
        QuantizationModifier(weights=ASYMMETRIC, kv_cache_scheme=HEADS),
        QuantizationModifier(weights=MX, input_activations={**MX, "dynamic": True}),
        QuantizationModifier(weights={"strategy": "block", "block_structure": [16, 32]}),
        QuantizationModifier(scheme={"weights": ASYMMETRIC}, targets="re:.*mlp.*"),
        QuantizationModifier(
            scheme={"targets": "lm_head", "weights": ASYMMETRIC, "format": "pack-quantized"}
        ),
        QuantizationModifier(scheme={"NVFP4": "re:.*mlp.*", "FP8": ["Linear"]}, unmatched="warn"),
        QuantizationModifier(config_groups={"NVFP4": "Linear"}, observer={"weights": "mse"}),
        QuantizationModifier(
            scheme="FP8",
            weight_observer={"name": "mse", "grid": 50},
            input_observer="percentile",
        ),
        [IMatrixGatherer(ignore="lm_head"), IMatrixGatherer(targets="lm_head"), "W8A8", "FP8"],
        [QuantizationModifier(scheme="FP8", ignore="é: ' \"# {}")],
    ],
    ids=lambda source: str(source)[:40],
)
def test_what_is_written_is_read_back(source: Any) -> None:
    recipe = load_recipe(source)
    text = recipe.to_yaml()
    assert load_recipe(text) == recipe
    assert load_recipe(text).to_yaml() == text
    assert "null" not in text
    assert "python" not in text
    for ours, again in zip(recipe.modifiers, load_recipe(text).modifiers, strict=True):
        if isinstance(ours, QuantizationModifier):
            assert isinstance(again, QuantizationModifier)
            assert ours.schemes == again.schemes


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    """JSON and YAML can spell one, and it cannot be written to the recipe of a checkpoint."""
    fields = '{"scheme": "W4A16",\n"weight_observer": "mse\\ud800"}'
    file = tmp_path / "recipe.json"
    file.write_text(f'{{"modifiers": {{"QuantizationModifier": {fields}}}}}')
    said = r"'mse\\ud800' has half a character \(a surrogate\) at position 3"
    with pytest.raises(RecipeError, match=rf"recipe\.json, line 2: {said}"):
        load_recipe(file)
    with pytest.raises(RecipeError, match=f"^{said}"):
        load_recipe(json.loads(file.read_text()))


def test_recipes_that_differ_are_not_equal() -> None:
    assert load_recipe("W4A16") != load_recipe("W8A16")
    one, other = ({"weights": {**ASYMMETRIC, "num_bits": bits}} for bits in (3, 4))
    assert load_recipe(QuantizationModifier(**one)) != load_recipe(QuantizationModifier(**other))


class TestErrors:
    def error(self, source: Any) -> str:
        with pytest.raises(RecipeError) as caught:
            load_recipe(source)
        assert caught.value.exit_code == 2
        return str(caught.value)

    def test_a_misspelt_key_in_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "recipe.yaml"
        text = OVERVIEW.format(modifier="QuantizationModifier").replace("num_bits", "num_bit")
        path.write_text(text)
        assert self.error(path) == (
            f"{path}, line 12: unknown key 'num_bit' in QuantizationModifier.weights. Did you mean "
            "'num_bits'? Allowed: num_bits, type, symmetric, group_size, strategy, "
            "block_structure, dynamic, actorder, scale_dtype, zp_dtype, observer, observer_kwargs."
        )

    @pytest.mark.parametrize(
        ("old", "new", "line", "text"),
        [
            (
                "quantization_stage",
                "quantization_stag",
                1,
                "'quantization_stag' in the recipe. Did ",
            ),
            ("quantization_modifiers", "modifires", 2, "'modifires' in 'quantization_stage'. Did "),
            ("QuantizationModifier", "QuantisationModifier", 3, "mean 'QuantizationModifier'?"),
            ("      weights", "      wieghts", 4, "'wieghts' in QuantizationModifier. Did you"),
            ("mse", "mes", 5, "unknown observer 'mes'. Did you mean 'mse'?"),
            ("grid", "gird", 10, "Unknown option 'gird' for observer 'mse'. Did you mean 'grid'?"),
            ("num_bits: 4", "num_bits: four", 12, "num_bits must be a valid integer"),
            ("type: int", "type: it", 13, "unknown type 'it'. Did you mean 'int'? Allowed: int, f"),
            ("symmetric: true", "symmetric: 7", 14, "symmetric must be a valid boolean"),
            ("strategy: channel", "strategy: group", 4, "requires group_size"),
            ("- Linear", "- [Linear]", 17, "pattern must be text, got ['Linear']"),
            ("- Linear", "- re:*mlp", 17, "'re:*mlp' is not a regular expression: nothing to r"),
        ],
    )
    def test_lines(self, old: str, new: str, line: int, text: str) -> None:
        message = self.error(OVERVIEW.format(modifier="QuantizationModifier").replace(old, new, 1))
        assert message.startswith(f"recipe, line {line}: ")
        assert text in message
        assert "pydantic" not in message

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (
                "modifiers:\n  QuantizationModifier:\n    config_groups:\n      a:\n"
                "        targets: [Linear]\n        weigths: {}",
                "line 6: unknown key 'weigths' in QuantizationModifier.config_groups.a. Did you "
                "mean 'weights'?",
            ),
            (
                "modifiers:\n  QuantizationModifier:\n    config_groups:\n      a:\n"
                "        targets: [Linear]\n        weights:\n          grop_size: 3",
                "line 7: unknown key 'grop_size' in QuantizationModifier.config_groups.a.weights. ",
            ),
            (
                "modifiers:\n  QuantizationModifier:\n    scheme: FP8\n    weight_observer:\n"
                "      name: mse\n      gird: 3",
                "line 6: QuantizationModifier.weight_observer: Unknown option 'gird'",
            ),
            (
                "modifiers:\n  QuantizationModifier:\n    scheme:\n      FP8: [Linear]\n"
                "      FP9: [Linear]",
                "line 5: QuantizationModifier.scheme: unknown scheme 'FP9'. Did you mean 'FP8'?",
            ),
            (
                "modifiers:\n  QuantizationModifier:\n    scheme: FP8\n    observer:\n"
                "      weight: mse",
                "line 5: unknown key 'weight' in QuantizationModifier.observer. Did you mean "
                "'weights'? Allowed: weights, input, output.",
            ),
            (
                "modifiers:\n  QuantizationModifier:\n    scheme: FP8\n    weights: {}",
                "line 4: QuantizationModifier has 'scheme' and 'weights'",
            ),
            (
                "modifiers:\n  SparseGPTModifier: {}",
                "line 2: Calipers does not have 'SparseGPTModifier'.",
            ),
            ("modifiers: 3", "line 1: 'modifiers' must be a mapping, got 3."),
            ("modifiers: {IMatrixGatherer: 3}", "line 1: 'IMatrixGatherer' must be a mapping"),
            ("QuantizationModifier: {}", "line 1: 'QuantizationModifier' stands directly in the r"),
            ("x_stage:\n  run_type: oneshot", "line 2: unknown key 'run_type' in 'x_stage'."),
        ],
    )
    def test_places(self, text: str, problem: str) -> None:
        assert self.error(text).startswith(f"recipe, {problem}")

    def test_data_without_lines(self) -> None:
        data = {"modifiers": {"QuantizationModifier": {"scheem": "FP8"}}}
        assert self.error(data).startswith("unknown key 'scheem' in QuantizationModifier. Did you")

    def test_no_modifiers(self) -> None:
        assert self.error("") == "recipe: A recipe must be a mapping, got nothing."
        assert "The recipe has no modifiers" in self.error("x_stage: {}")
        assert "The recipe has no modifiers" in self.error([])

    def test_what_is_no_recipe(self, tmp_path: Path) -> None:
        assert self.error("W4A61").startswith("'W4A61' is neither a file, nor YAML")
        assert "Did you mean 'W4A16'?" in self.error("W4A61")
        assert "cannot be read: No such file" in self.error("nowhere.yaml")
        assert "cannot be read: it is a folder" in self.error(tmp_path)
        (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe")
        assert "is not UTF-8 text" in self.error(tmp_path / "recipe.yaml")
        assert "got 3." in self.error(3)
        assert "got <class" in self.error(QuantizationModifier)
