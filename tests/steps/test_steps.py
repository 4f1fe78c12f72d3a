"""A step that nobody has heard of takes part in a run without a change anywhere else."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from calibrating import batches_of, captured, linears, run, samples, small
from torch import Tensor

from calipers import QuantizationModifier, load_recipe, oneshot
from calipers.errors import CalipersWarning, ConfigurationError
from calipers.planning.checks import matches
from calipers.planning.plan import StepPlan
from calipers.planning.specs import Requirement
from calipers.statistics.base import Reduction, Statistic
from calipers.steps import Modifier
from calipers.steps.base import STEPS, Changes, Layer, Patterns

TARGET = "re:.*down_proj"


class InputSums(Statistic):
    """Σx of each channel."""

    reductions: ClassVar[Mapping[str, Reduction]] = {
        "total": Reduction.SUM,
        "count": Reduction.SUM,
    }
    total: Tensor
    count: Tensor

    @property
    def num_tokens(self) -> int:
        return int(getattr(self, "count", 0))

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        tokens = x.reshape(-1, x.shape[-1]) if mask is None else x[mask]
        self.absorb(total=tokens.double().sum(0), count=torch.tensor(len(tokens)))


class MeanShift(Modifier):
    """Adds the mean of its inputs to every row of a weight."""

    targets: Patterns = ("Linear",)
    fails: bool = False

    def target_patterns(self) -> tuple[Any, Any]:
        return self.targets, ()

    def plan(self, model: torch.nn.Module, step: str) -> StepPlan:  # noqa: ARG002
        wanted = Requirement("input", "sums", lambda _: InputSums())
        return StepPlan(measured=dict.fromkeys(matches(model, self.targets[0]), (wanted,)))

    def solve(self, layer: Layer) -> Changes:
        if self.fails and any("layers.1" in name for name in layer.names):
            raise RuntimeError("half of the model is done")
        weights = {}
        for name in layer.names:
            sums = layer.measurements.get(name, "input", "sums")
            if sums is not None:
                mean = sums.total / sums.count
                new = (layer.weight(name).double() + mean).to(layer.weight(name).dtype)
                weights[name, "weight"] = new
        return Changes(tensors=weights)


def quietly(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        return oneshot(*args, **kwargs)


def shifted(model: Any, batches: Any) -> dict[str, Tensor]:
    """The weights that the step must lead to, from inputs captured by hooks of our own."""
    with captured(model) as (inputs, _):
        run(model, batches)
    masks = [batch["attention_mask"].bool() for batch in batches]
    found = {}
    for name in linears(model):
        if name.endswith("down_proj"):
            seen = torch.cat([x[m] for x, m in zip(inputs[name], masks, strict=True)]).double()
            found[name] = model.get_submodule(name).weight.detach() + seen.mean(0).float()
    return found


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_a_new_step_changes_weights_by_what_it_measured(pipeline: Any) -> None:
    model, batches = small("llama"), batches_of(samples(6), 2)
    before = {name: model.get_submodule(name).weight for name in linears(model)}
    expected = shifted(model, batches)
    quietly(model, [MeanShift(targets=TARGET)], list(batches), pipeline=pipeline)
    for name, weight in before.items():
        now = model.get_submodule(name).weight
        if name in expected:
            torch.testing.assert_close(now, expected[name], rtol=1e-5, atol=1e-6)
            assert now is not weight
        else:
            assert now is weight


def test_the_next_step_sees_the_new_weight() -> None:
    model, batches = small("llama"), batches_of(samples(6), 2)
    expected = shifted(model, batches)
    weights = {"num_bits": 8, "strategy": "channel"}
    recipe = [MeanShift(targets=TARGET), QuantizationModifier(weights=weights)]
    errors = quietly(model, recipe, list(batches)).errors
    for name, weight in expected.items():
        scale = weight.abs().amax(1, keepdim=True) / 127.5
        torch.testing.assert_close(model.get_submodule(name).weight_scale, scale, rtol=1e-5, atol=0)
        rounded = (weight / scale).round().clamp(-128, 127) * scale
        error = float((rounded - weight).norm() / weight.norm())
        assert errors[name] == pytest.approx(error, rel=1e-2)


class Noting(QuantizationModifier):
    """Notes which tensors it is given to solve."""

    given: ClassVar[list[list[tuple[str, str]]]] = []

    def solve(self, layer: Layer) -> Changes:
        self.given.append([(m.name, t.base_name) for m in layer.modules for t in m.tensors])
        return super().solve(layer)


def test_a_step_is_given_the_tensors_that_it_has_claimed() -> None:
    model = small("llama")
    weights = Noting(weights={"num_bits": 8, "strategy": "channel"})
    inputs = Noting(targets=TARGET, input_activations={"num_bits": 8, "dynamic": False})
    quietly(model, [weights, inputs], list(batches_of(samples(4), 2)), pipeline="basic")
    names = linears(model)
    assert Noting.given == [
        [(name, "weight") for name in names],
        [(name, "input") for name in names if name.endswith("down_proj")],
    ]


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_a_run_that_fails_leaves_every_weight(pipeline: Any) -> None:
    model, batches = small("llama"), batches_of(samples(4), 2)
    before = {name: model.get_submodule(name).weight for name in linears(model)}
    values = {name: weight.detach().clone() for name, weight in before.items()}
    with pytest.raises(RuntimeError, match="half of the model is done"):
        quietly(model, [MeanShift(targets=TARGET, fails=True)], list(batches), pipeline=pipeline)
    for name, weight in before.items():
        assert model.get_submodule(name).weight is weight
        assert torch.equal(weight, values[name])


def test_a_failure_after_solving_undoes_the_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = small("llama"), batches_of(samples(4), 2)
    before = {name: model.get_submodule(name).weight for name in linears(model)}

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr("calipers.engine.oneshot.write_checkpoint", fail)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        quietly(model, [MeanShift(targets=TARGET)], list(batches), output_dir="nowhere")
    for name, weight in before.items():
        assert model.get_submodule(name).weight is weight


class OtherGPTQ(Modifier):
    """A step of a package that takes the method of ours."""

    method = "gptq"


def test_a_method_is_that_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STEPS, "_sources", dict(STEPS._sources))
    STEPS.add(OtherGPTQ)
    text = "^The method 'gptq' is that of two modifiers: GPTQModifier and OtherGPTQ"
    with pytest.raises(ConfigurationError, match=text):
        load_recipe("W4A16").changed(method="rtn")
