"""AutoRoundModifier: never worse on held-out samples than what it starts from, and why not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from calibrating import batches_of, samples, small
from rank_laws import in_threads
from torch import Tensor

import calipers.steps.rounding as step_of_rounding
from calipers import AutoRoundModifier, GPTQModifier, measure, oneshot
from calipers.errors import CalipersWarning, RecipeError
from calipers.recipes import load_recipe

# A start that leaves something to learn: scales of the extrema, and no sweeps after error feedback.
POOR: dict[str, Any] = {"ignore": "lm_head", "dampening_frac": 1.0, "sweeps": 0}
INT = {"num_bits": 3, "strategy": "group", "group_size": 8, "observer": "memoryless_minmax"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "observer": "memoryless_minmax"}
WEIGHTS = {
    "int3": INT,
    "int3, zero points": {**INT, "symmetric": False},
    "int3 per tensor": {"num_bits": 3, "strategy": "tensor", "observer": "memoryless_minmax"},
    "fp8": FP8,
}
pytestmark = pytest.mark.filterwarnings("ignore:The data has:calipers.errors.CalipersWarning")
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}


def quietly(model: Any, how: Any, data: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        return oneshot(model, how, data, progress=False, shuffle=False, **options)


def loader(count: int, size: int = 2) -> list[dict[str, Tensor]]:
    return list(batches_of(samples(count), size))


def learning(weights: dict[str, Any], **options: Any) -> AutoRoundModifier:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return AutoRoundModifier(config_groups=groups, iters=24, batch_size=4, **{**POOR, **options})


def started(how: AutoRoundModifier) -> GPTQModifier:
    start = how.converted_to(GPTQModifier)
    assert isinstance(start, GPTQModifier)
    return start


def held_out_error(model: Any, reference: Any, data: list[dict[str, Tensor]]) -> float:
    """What the first layer of a frozen model loses on the batches that are held out."""
    error = 0.0
    for batch in [each for index, each in enumerate(data) if index % 5 == 2]:
        outputs = [
            each(**batch, output_hidden_states=True).hidden_states[1] for each in (model, reference)
        ]
        mask = batch["attention_mask"].bool()
        error += float((outputs[0] - outputs[1])[mask].square().sum())
    return error


@pytest.mark.parametrize("name", WEIGHTS)
@torch.no_grad()
def test_stored_weights_lose_less_on_held_out_samples_than_the_start(name: str) -> None:
    data, how = loader(24), learning(WEIGHTS[name])
    results = [quietly(small("llama", **SIZES), each, data) for each in (started(how), how)]
    before, after = (held_out_error(each.model, small("llama", **SIZES), data) for each in results)
    assert after < before
    assert "model.layers.0" not in results[1].notes
    assert set(results[1].notes.values()) <= {step_of_rounding.KEPT}
    # What is judged is what is stored.
    for name, module in results[1].model.named_modules():
        if name in results[1].errors:
            original = small("llama", **SIZES).get_submodule(name).weight
            error = float((module.weight - original).norm() / original.norm())
            assert error == pytest.approx(results[1].errors[name], rel=1e-4)


@pytest.mark.parametrize(("rate", "seed"), [(1.0, 0), (0.3, 1), (0.1, 2), (0.003, 3)])
@torch.no_grad()
def test_no_rate_makes_a_layer_worse_than_the_start(rate: float, seed: int) -> None:
    data = list(batches_of(samples(16, seed), 2))
    # Without folds, batches are those that are given.
    start = GPTQModifier(scheme="W4A16", ignore="lm_head", dampening_frac=0.01).regrouped(8)
    assert start is not None
    learned = start.converted_to(AutoRoundModifier)
    assert isinstance(learned, AutoRoundModifier)
    learned = learned._changed({"lr": rate, "iters": 10, "batch_size": 2})
    results = [quietly(small("llama", **SIZES), each, data) for each in (start, learned)]
    before, after = (held_out_error(each.model, small("llama", **SIZES), data) for each in results)
    assert after <= before


def weights_of(result: Any) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in result.model.state_dict().items() if "proj" in name}


def assert_same_weights(one: Any, other: Any) -> None:
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_gradient_that_is_not_finite_leaves_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    real = step_of_rounding.squared_error

    def fail(outputs: Tensor, targets: Tensor) -> Tensor:
        error = real(outputs, targets)
        return error * torch.nan if outputs.requires_grad else error

    monkeypatch.setattr(step_of_rounding, "squared_error", fail)
    how, data = learning(INT), loader(24)
    result = quietly(small("llama"), how, data)
    layers = [f"model.layers.{index}" for index in range(2)]
    assert result.notes == dict.fromkeys(layers, step_of_rounding.NOT_FINITE)
    assert_same_weights(result, quietly(small("llama"), started(how), data))


def test_without_samples_to_hold_out_the_start_stays_and_that_is_said() -> None:
    how, data = learning(INT), loader(6, size=6)
    with pytest.warns(CalipersWarning, match=r"model\.layers\.0, .*one batch of samples"):
        result = oneshot(small("llama"), how, data, progress=False)
    assert_same_weights(result, quietly(small("llama"), started(how), data))


def test_measurements_give_the_start_and_that_is_said() -> None:
    model = small("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        seen = measure(model, loader(6), collect="hessian", progress=False)
    with pytest.warns(CalipersWarning, match="learned rounding needs data that runs"):
        result = oneshot(model, learning(INT), measurements=seen, progress=False)
    start = quietly(small("llama"), started(learning(INT)), None, measurements=seen)
    assert_same_weights(result, start)


def test_experts_that_no_token_reaches_keep_their_start() -> None:
    data = loader(16)
    results = [
        quietly(
            small("qwen2_moe"), each, data, on_unseen="weights_only", calibrate_all_experts=False
        )
        for each in (started(learning(INT)), learning(INT))
    ]
    unseen = {name for name, tokens in results[0].coverage.tokens.items() if not tokens}
    ours, theirs = map(weights_of, results)
    changed = {
        name.removesuffix(".weight") for name in ours if not torch.equal(ours[name], theirs[name])
    }
    assert any("experts" in name for name in changed)
    assert not changed & unseen


def test_ranks_learn_the_same() -> None:
    batches = loader(24)

    models = [small("llama", **SIZES) for _ in range(2)]

    def job(ranks: Any) -> Any:
        return quietly(models[ranks.rank], learning(INT), batches)

    one, other = in_threads(2, job)
    assert_same_weights(one, other)
    assert one.notes == other.notes
    assert "model.layers.0" not in one.notes


RECIPE = """
test_stage:
  modifiers:
    AutoRoundModifier:
      ignore: ["lm_head"]
      iters: 12
      lr: 0.05
      batch_size: 4
      enable_torch_compile: false
      disable_opt_rtn: true
      scheme: W4A16
      targets: ["Linear"]
"""


def test_a_recipe_of_llm_compressor_runs_as_it_is() -> None:
    recipe = load_recipe(RECIPE).changed(group_size=8)
    (step,) = recipe.modifiers
    assert isinstance(step, AutoRoundModifier)
    assert (step.iters, step.lr, step.batch_size) == (12, 0.05, 4)
    result = quietly(small("llama"), recipe, loader(12))
    assert load_recipe(result.recipe.to_yaml()).to_yaml() == result.recipe.to_yaml()


def test_a_recipe_is_given_another_method() -> None:
    (step,) = load_recipe("W4A16").changed(method="rounding").modifiers
    assert isinstance(step, AutoRoundModifier)
    assert step.plan(
        small("llama", hidden_size=128, head_dim=32, intermediate_size=128), ""
    ).tunes_layers


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"iters": 0}, r"AutoRoundModifier\.iters.* without a step nothing is learned.*got 0"),
        ({"lr": 0}, r"AutoRoundModifier\.lr"),
        ({"batch_size": 0}, r"AutoRoundModifier\.batch_size"),
        ({"device_ids": "0,1"}, r"AutoRoundModifier\.device_ids.* one device"),
        ({"error_propagation": "quantized"}, r"AutoRoundModifier\.error_propagation.*'both'"),
        ({"iter": 3}, r"unknown key 'iter'.*iters"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        AutoRoundModifier(scheme="W4A16", **options)
