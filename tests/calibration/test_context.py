"""What observers see of real models, against activations captured by hooks of our own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrating import (
    CHANNEL,
    STATIC,
    anatomy,
    attentions,
    batches_of,
    calibrated,
    captured,
    contents,
    heads,
    joined,
    linears,
    observer,
    plan_of,
    run,
    run_of,
    same_qparams,
    samples,
    show,
    small,
    solved,
)
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from calipers.calibration.context import Calibration
from calipers.calibration.pipelines import call_model, run_basic, run_datafree
from calipers.errors import ConfigurationError, ModelRunError, TensorValueError
from calipers.observers import Observer
from calipers.planning.plan import Plan
from calipers.statistics.tensor_statistics import TensorStatistics
from calipers.statistics.value_counts import ValueCounts

KINDS = ["llama", "qwen2", "mistral"]
PER_HEAD = STATIC.model_copy(update={"strategy": "attn_head"})


def tokens_of(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """The tokens that count, of activations (batch, sequence, channels)."""
    pairs = zip(tensors, masks, strict=True)
    return torch.cat([tensor[mask.bool()] for tensor, mask in pairs])


def check_range(observer: Observer, values: Tensor) -> None:
    assert float(observer.min_vals) == float(values.min())
    assert float(observer.max_vals) == float(values.max())


def rotated(model: Any, states: Sequence[Tensor]) -> list[Tensor]:
    """Projections with their positions put in, as (batch, sequence, heads · dim)."""
    found = []
    for each in heads(states):
        cos, sin = model.model.rotary_emb(each, torch.arange(each.shape[2])[None])
        turned, _ = apply_rotary_pos_emb(each, each, cos, sin)
        found.append(turned.transpose(1, 2).flatten(-2))
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_observers_see_what_flows(kind: str, size: int) -> None:
    model, batches = small(kind), batches_of(samples(5), size)
    masks = [batch["attention_mask"] for batch in batches]
    with captured(model) as (inputs, outputs):
        logits = run(model, batches)
    before, tensors = anatomy(model), contents(model)
    plan = plan_of(model, outputs=STATIC, states=STATIC)
    with Calibration(model, plan) as calibration:
        for index, batch in enumerate(batches):
            with calibration.batch(index, batch["attention_mask"]):
                assert torch.equal(model(**batch, use_cache=False).logits, logits[index])
        calibration.finish(plan.names)
    for name in linears(model):
        check_range(observer(calibration, name, "input"), tokens_of(inputs[name], masks))
        check_range(observer(calibration, name, "output"), tokens_of(outputs[name], masks))
        assert calibration.tokens(name) == sum(int(mask.sum()) for mask in masks)
    for name in attentions(model):
        states = {base: outputs[f"{name}.{base}_proj"] for base in "qkv"}
        for base in "qk":
            seen = tokens_of(rotated(model, states[base]), masks)
            check_range(observer(calibration, name, base), seen)
            plain = tokens_of(states[base], masks)
            assert float(seen.max()) != float(plain.max())  # positions do make a difference
        check_range(observer(calibration, name, "v"), tokens_of(states["v"], masks))
    assert anatomy(model) == before
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(torch.equal(a, b) for a, b in zip(run(model, batches), logits, strict=True))


@pytest.mark.parametrize(
    ("kind", "attention"), [("attention", "sdpa"), ("kv_cache", "sdpa"), ("kv_cache", "eager")]
)
def test_each_head_by_itself(kind: str, attention: str) -> None:
    model = small("llama", attn_implementation=attention)
    batches = batches_of(samples(4), 2)
    with captured(model) as (_, outputs):
        logits = run(model, batches)
    masks = [batch["attention_mask"] for batch in batches]
    whole = plan_of(model, states=PER_HEAD, kind=kind)
    plan = replace(whole, modules=whole.modules[-2:])
    with Calibration(model, plan) as calibration:
        for index, batch in enumerate(batches):
            with calibration.batch(index, batch["attention_mask"]):
                assert torch.equal(model(**batch, use_cache=False).logits, logits[index])
        calibration.finish(plan.names)
    assert model.config._attn_implementation == attention
    names = attentions(model)
    bases = "qkv" if kind == "attention" else "kv"
    for name in names:
        assert len(calibration.measurements.needed(name)) == len(bases)
    for name, base in [(name, base) for name in names for base in bases]:
        states = outputs[f"{name}.{base}_proj"]
        states = states if base == "v" else rotated(model, states)
        seen = tokens_of(states, masks).unflatten(-1, (-1, 8))
        found = observer(calibration, name, base)
        assert torch.equal(found.max_vals.flatten(), seen.amax(dim=(0, 2)))
        assert torch.equal(found.min_vals.flatten(), seen.amin(dim=(0, 2)))


def test_a_cache_fills_as_it_would() -> None:
    model = small("llama")
    ids = joined(samples(2))["input_ids"]
    with torch.no_grad():
        plain = model(ids, use_cache=True)
        plan = plan_of(model, states=STATIC)
        with Calibration(model, plan) as calibration, calibration.batch(0):
            seen = model(ids, use_cache=True)
    assert torch.equal(plain.logits, seen.logits)
    for mine, other in zip(plain.past_key_values.layers, seen.past_key_values.layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)


def test_queries_of_eager_attention_cannot_be_seen() -> None:
    model = small("llama", attn_implementation="eager")
    before, plan = anatomy(model), plan_of(model, states=STATIC)
    message = (
        "LlamaForCausalLM computes attention by 'eager', in which the queries cannot be seen or "
        'quantized. Call model.set_attn_implementation("sdpa") first, or quantize the keys and '
        "values alone (kv_cache_scheme)."
    )
    with (
        pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"),
        Calibration(model, plan),
    ):
        pytest.fail("queries that cannot be seen were promised")
    assert anatomy(model) == before


def test_who_is_dismissed_sees_nothing_more() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = plan_of(model, outputs=STATIC)
    with Calibration(model, plan, share_inputs=False) as calibration:
        for left in ([], ["0"]):
            calibration.remove_hooks(left)
            with calibration.batch(0):
                model(torch.ones(3, 4))
    for name, tokens in (("0", 3), ("1", 6)):
        for base in ("input", "output"):
            assert observer(calibration, name, base).num_tokens == tokens


def test_a_module_has_seen_what_all_its_observers_saw() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    plan = plan_of(model, outputs=STATIC)
    with Calibration(model, plan) as calibration:
        for base, tokens in (("input", 5), ("output", 3)):
            show(calibration, "0", base, torch.ones(tokens, 4))
        assert calibration.tokens("0") == calibration.measurements.tokens("0") == 3
        solution = solved(calibration, run_datafree(run_of(calibration)))
    assert solution.coverage.tokens == {"0": 3}


def test_nothing_is_measured_where_no_data_is_needed() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with Calibration(model, plan_of(model, inputs=None)) as calibration:
        assert not model[0]._forward_pre_hooks
        assert not model[0]._forward_hooks
    assert calibration.measurements.of(["0"]) == []


@pytest.mark.parametrize("name", ["static_minmax", "histogram_mse"])
def test_values_are_counted_once(name: str) -> None:
    """For costs, and for the solver if that needs counts."""
    model = nn.Sequential(nn.Linear(4, 4))
    inputs = STATIC.model_copy(update={"observer": name})
    with Calibration(model, plan_of(model, inputs=inputs)) as calibration:
        found = [each for each in calibration.measurements.of(["0"]) if type(each) is ValueCounts]
    assert len(found) == 1


# Leaving the model as it was


def fail_in_the_middle(model: Any, plan: Plan, batches: Any) -> None:
    with Calibration(model, plan) as calibration:
        for index, batch in enumerate(batches):
            with calibration.batch(index, batch["attention_mask"]):
                if index == 1:
                    batch["input_ids"][0, 0] = 999
                call_model(model, batch)


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model, batches = small("llama"), batches_of(samples(3), 1)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    before, tensors, config = anatomy(model), contents(model), model.config.to_dict()
    plan = plan_of(model, outputs=STATIC, states=STATIC, gathered=["lm_head"])
    with pytest.raises(ModelRunError, match="IndexError"):
        fail_in_the_middle(model, plan, batches)
    assert anatomy(model) == before
    assert model.config.to_dict() == config
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())
    handle.remove()
    assert not model.model.layers[0].mlp._forward_hooks


def test_a_plan_that_cannot_be_watched_leaves_the_model_as_it_was() -> None:
    model = small("llama")
    plan = plan_of(model, states=STATIC)
    nowhere = replace(plan.modules[0], name="model.layers.0.no_such_proj")
    plan = replace(plan, modules=(*plan.modules, nowhere))
    before = anatomy(model)
    with pytest.raises(AttributeError, match="no_such_proj"), Calibration(model, plan):
        pytest.fail("a plan for a module that does not exist was accepted")
    assert anatomy(model) == before


@pytest.mark.parametrize("share", [True, False])
def test_values_that_are_not_finite_name_module_and_batch(share: bool) -> None:
    model, batches = small("llama"), batches_of(samples(4), 1)
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = torch.inf
    rows = [
        torch.tensor([1, 2, 3]),
        torch.tensor([4, 5]),
        torch.tensor([6, 63]),
        torch.tensor([63]),
    ]
    batches, before = batches_of(rows, 1), anatomy(model)
    message = (
        r"^Observer 'static_minmax' \(input of model\.layers\.0\.self_attn\.q_proj\) was given "
        r"\d+ non-finite values .* It was batch 2, the first one with such values\.$"
    )
    with pytest.raises(TensorValueError, match=message):
        calibrated(model, plan_of(model), run_basic, batches, share_inputs=share)
    assert anatomy(model) == before


def test_gathering_refuses_values_that_are_not_finite() -> None:
    model = small("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = torch.inf
    batches = batches_of([torch.tensor([1, 2]), torch.tensor([1, 63])], 1)
    plan = plan_of(model, weights=None, inputs=None, gathered=["model.layers.0.self_attn.v_proj"])
    message = r"input of model\.layers\.0\.self_attn\.v_proj\) .* It was batch 1, the first one"
    with pytest.raises(TensorValueError, match=message):
        calibrated(model, plan, run_basic, batches)


def test_a_weight_that_is_not_finite_names_the_module() -> None:
    model = small("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    before = anatomy(model)
    plan = plan_of(model, inputs=None)
    message = r"\(weight of model\.layers\.1\.mlp\.down_proj\) was given 1 non-finite value "
    with pytest.raises(TensorValueError, match=message):
        calibrated(model, plan, run_datafree)
    assert anatomy(model) == before


# Once for all


def test_shared_inputs_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = small("llama"), batches_of(samples(6), 2)
    calls: list[None] = []
    update = TensorStatistics.update

    def counted(self: TensorStatistics, *args: Any, **kwargs: Any) -> None:
        calls.append(None)
        update(self, *args, **kwargs)

    monkeypatch.setattr(TensorStatistics, "update", counted)
    plan = plan_of(model, weights=None)
    shared = calibrated(model, plan, run_basic, batches)
    # (q, k, v), o, (gate, up), down in two layers, and the head
    assert len(calls) == (4 * 2 + 1) * len(batches)
    calls.clear()
    separate = calibrated(model, plan, run_basic, batches, share_inputs=False)
    assert len(calls) == (7 * 2 + 1) * len(batches)
    assert same_qparams(shared, separate)


@pytest.mark.parametrize("observer", ["minmax", "mse", "histogram_mse", "percentile"])
def test_sharing_changes_no_result(observer: str) -> None:
    model, batches = small("llama"), batches_of(samples(5), 2)
    plan = plan_of(
        model,
        weights=CHANNEL.model_copy(update={"observer": "imatrix_mse"}),
        inputs=STATIC.model_copy(update={"observer": observer}),
        gathered=linears(model)[:2],
    )
    shared = calibrated(model, plan, run_basic, batches)
    separate = calibrated(model, plan, run_basic, batches, share_inputs=False)
    assert same_qparams(shared, separate)
    assert shared.coverage == separate.coverage
    assert shared.changes.published.keys() == set(linears(model)[:2])
    for name, sums in shared.changes.published.items():
        for field, value in sums.items():
            assert torch.equal(value, separate.changes.published[name][field])
