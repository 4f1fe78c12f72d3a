"""Method, group size and observers, put on top of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from models import small_llama

from calipers import oneshot
from calipers.errors import CalipersError, CalipersWarning, ConfigurationError, RecipeError
from calipers.options import RecipeOptions
from calipers.recipes import Recipe, load_recipe
from calipers.steps import GPTQModifier, IMatrixGatherer, QuantizationModifier
from calipers.steps.base import STEPS

INT4 = {"num_bits": 4, "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "strategy": "channel"}
STATIC = {"num_bits": 8, "strategy": "tensor", "observer": "minmax"}
FORMS: dict[str, dict[str, Any]] = {
    "preset": {"scheme": "W4A16"},
    "presets": {"scheme": {"W4A16": ["re:.*mlp.*"], "FP8": ["re:.*attn.*proj"]}},
    "scheme": {"scheme": {"weights": {**INT4, "observer": "mse"}}},
    "groups": {"config_groups": {"one": {"targets": ["Linear"], "weights": INT4}}},
    "explicit": {"weights": INT4, "observer": {"weights": "mse"}, "input_activations": STATIC},
    "own key": {"weights": INT4, "weight_observer": {"name": "mse", "grid": 50}},
}


def recipe_of(**given: Any) -> Recipe:
    return load_recipe([IMatrixGatherer(), QuantizationModifier(ignore="lm_head", **given)])


def rows(recipe: Recipe, tensor: str = "weight") -> set[tuple[str, str, str]]:
    model = small_llama(hidden_size=128, intermediate_size=256)
    found = recipe.compile(model).rows()
    return {(r["format"], r["strategy"], r["observer"]) for r in found if r["tensor"] == tensor}


@pytest.mark.parametrize("form", FORMS)
def test_every_weight_in_groups_takes_the_size(form: str) -> None:
    recipe = recipe_of(**FORMS[form])
    before, text = rows(recipe), recipe.to_yaml()
    changed = recipe.changed(group_size=32)
    after = {(fmt, cut.replace("128", "32"), who) for fmt, cut, who in before}
    assert rows(changed) == after != before
    assert rows(changed, "input") == rows(recipe, "input")
    assert recipe.to_yaml() == text  # a recipe is never changed itself
    assert load_recipe(changed.to_yaml()).compile(small_llama()).rows() == (
        changed.compile(small_llama()).rows()
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_observer_of_weights_gives_way(form: str) -> None:
    recipe = recipe_of(**FORMS[form])
    choice = {"name": "optimal", "importance": "none"}
    changed = recipe.changed(weight_observer=choice, group_size=32)
    assert {who for _, _, who in rows(changed)} == {"optimal(importance=none)"}
    assert rows(changed, "input") == rows(recipe, "input")
    assert rows(load_recipe(changed.to_yaml())) == rows(changed)


@pytest.mark.parametrize(
    "given",
    [
        {"scheme": "FP8"},
        {"weights": INT8, "input_activations": STATIC, "output_activations": STATIC},
        {"scheme": "FP8", "input_observer": "minmax"},
        {"scheme": "W8A8_STATIC", "observer": {"input": "minmax", "weights": "mse"}},
        {"config_groups": {"a": {"targets": ["Linear"], "input_activations": STATIC}}},
    ],
)
def test_the_observer_of_static_activations_gives_way(given: dict[str, Any]) -> None:
    recipe = recipe_of(**given)
    changed = recipe.changed(activation_observer="percentile")
    assert {who for _, _, who in rows(changed, "input")} == {"percentile"}
    assert rows(changed) == rows(recipe)


def test_only_modifiers_that_have_something_to_watch_are_changed() -> None:
    fp8 = QuantizationModifier(targets="re:.*mlp.*", scheme="FP8")
    w4 = QuantizationModifier(targets="re:.*attn.*proj", scheme="W4A16")
    changed = load_recipe([w4, fp8]).changed(activation_observer="percentile", group_size=64)
    assert {who for _, _, who in rows(changed, "input")} == {"percentile"}  # and no warning
    assert changed.modifiers[1].regrouped(64) is None
    assert {cut for _, cut, _ in rows(changed)} == {"group 64", "tensor"}


def test_an_observer_without_anything_to_watch_is_told() -> None:
    text = "activation_observer='percentile' has no effect: what it would watch is not quantized"
    for scheme in ("W4A16", "FP8_DYNAMIC"):
        with pytest.warns(CalipersWarning, match=text):
            load_recipe(scheme).changed(activation_observer="percentile")


@pytest.mark.parametrize(
    ("scheme", "weights"),
    [
        ("FP8", "float8 per tensor"),
        ("NVFP4", "float4 per tensor_group 16"),
        ("MXFP4", "float4 per group 32"),
    ],
)
def test_without_free_groups_a_group_size_is_refused(scheme: str, weights: str) -> None:
    text = (
        f"group_size=32 has no meaning here: its weights are {weights}. Groups whose size can be "
        "chosen are those of strategy 'group', as in W4A16; those of NVFP4 and MX are fixed by the "
        "format. Leave it out, or choose another scheme."
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(scheme).changed(group_size=32)
    assert (str(caught.value), caught.value.exit_code) == (text, 2)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "32"])
def test_a_group_size_is_a_number(size: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"is not allowed\. Allowed: a whole number, 1 or more"
    ):
        load_recipe("W4A16").changed(group_size=size)


def test_words_that_mean_no_observer() -> None:
    with pytest.raises(RecipeError, match=r"^weight_observer: unknown observer 'optimall'\. Did"):
        load_recipe("W4A16").changed(weight_observer="optimall")
    with pytest.raises(RecipeError, match=r"^activation_observer: .*Unknown option 'gird'"):
        load_recipe("FP8").changed(activation_observer={"name": "mse", "gird": 3})
    with pytest.raises(RecipeError, match=r"^weight_observer: an observer is given by its name"):
        load_recipe("FP8").changed(weight_observer=3)


def test_code_put_on_top_needs_permission(tmp_path: Path) -> None:
    file, marker = tmp_path / "mine.py", tmp_path / "it-ran"
    file.write_text(f"open({str(marker)!r}, 'w')\n")
    with pytest.raises(CalipersError, match="allow_code=True"):
        oneshot("nowhere/at/all", "W4A16", weight_observer=f"{file}:Mine")
    assert not marker.exists()


def test_sizes_that_would_fit_are_named() -> None:
    model = small_llama(hidden_size=288, intermediate_size=768, num_attention_heads=6)
    with pytest.raises(ConfigurationError) as caught:
        load_recipe("W4A16").compile(model)
    last = str(caught.value).splitlines()[-1]
    assert last == (
        "Sizes that fit every weight: group_size=96, group_size=32, group_size=16. Choose one, or "
        "ignore these modules."
    )
    load_recipe("W4A16").changed(group_size=96).compile(model)
    with pytest.raises(ConfigurationError, match=r"\nChoose another scheme, or ignore these mod"):
        load_recipe("FP8_BLOCK").compile(model)


@pytest.mark.parametrize("form", FORMS)
def test_another_method_says_the_same(form: str) -> None:
    rtn = recipe_of(**FORMS[form])
    gptq = rtn.changed(method="gptq")
    gatherer, modifier = gptq.modifiers
    assert (gatherer, type(modifier)) == (IMatrixGatherer(), GPTQModifier)
    assert rows(gptq, "input") == rows(rtn, "input")
    assert gptq.changed(method="rtn") == rtn.changed(method="rtn") == rtn
    chosen, default = "memoryless_mse", ("memoryless_minmax", "optimal(importance=hessian)")
    for (*how, before), (*same, after) in zip(*map(sorted, map(rows, (rtn, gptq))), strict=True):
        assert how == same
        assert (before, after) == default or (before == after and before.startswith(chosen))


def test_the_method_comes_before_what_else_is_put_on_top() -> None:
    """The default observer is that of the method; groups would name it, as if it were chosen."""
    changed = load_recipe("W4A16").changed(method="gptq", group_size=32)
    assert rows(changed) == {("int4", "group 32", "optimal(importance=hessian)")}
    changed = load_recipe("W4A16").changed(method="gptq", weight_observer="mse")
    assert rows(changed) == {("int4", "group 128", "memoryless_mse")}


def test_what_only_one_method_knows_is_dropped_by_the_other() -> None:
    ordered = {**INT4, "actorder": "weight"}
    groups = {"one": {"targets": ["Linear"], "weights": ordered}}
    for form in ({"weights": ordered}, {"scheme": {"weights": ordered}}, {"config_groups": groups}):
        gptq = load_recipe([GPTQModifier(block_size=64, ignore="lm_head", **form)])
        assert rows(gptq.changed(method="rtn")) == {("int4", "group 128", "memoryless_minmax")}
        assert gptq.changed(method="gptq") == gptq


@pytest.mark.parametrize("order", [None, "weight"])
def test_what_gptq_was_told_survives(order: str | None) -> None:
    gptq = GPTQModifier(scheme="W4A16", sweeps=0, actorder=order, error_propagation="float")
    recipe = load_recipe([gptq])
    assert load_recipe(recipe.to_yaml()).modifiers == (gptq,)
    for (changed,) in (
        recipe.changed(group_size=32).modifiers,
        recipe.changed(weight_observer="mse").modifiers,
    ):
        assert isinstance(changed, GPTQModifier)
        assert (changed.sweeps, changed.actorder) == (0, order)


def test_who_has_no_weights_stays() -> None:
    cache = QuantizationModifier(kv_cache_scheme={"num_bits": 8})
    both = load_recipe([cache, QuantizationModifier(scheme="W4A16")]).changed(method="gptq")
    assert both.modifiers == (cache, GPTQModifier(scheme="W4A16"))
    text = (
        "method='{}' has no meaning here: the recipe quantizes no weights. Leave it out, or choose "
        "a scheme with weights, such as W4A16."
    )
    for method in ("gptq", "rtn"):
        with pytest.raises(RecipeError) as caught:
            load_recipe([IMatrixGatherer(), cache]).changed(method=method)
        assert (str(caught.value), caught.value.exit_code) == (text.format(method), 2)
    with pytest.raises(
        ConfigurationError, match=r"'gtpq' is not .* 'gptq'\? Allowed: rtn, gptq, rounding"
    ):
        oneshot("nowhere/at/all", "W4A16", method="gtpq")  # type: ignore[arg-type]


class FloorModifier(QuantizationModifier):
    """A step of somebody else that rounds weights in its own way."""

    method = "floor"


def test_the_method_of_a_step_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STEPS, "_sources", dict(STEPS._sources))
    STEPS.add(FloorModifier)
    changed = recipe_of(scheme="W4A16").changed(method=RecipeOptions(method="floor").method)
    assert any(isinstance(step, FloorModifier) for step in changed.modifiers)
    with pytest.raises(ConfigurationError, match=r"method='flor' is not allowed.*'floor'"):
        recipe_of(scheme="W4A16").changed(method="flor")
