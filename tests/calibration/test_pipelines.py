"""Every way through a model finds the same, and what can be worked out by hand."""

from __future__ import annotations

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
    linears,
    plan_of,
    run_of,
    same_qparams,
    samples,
    small,
)
from compressed_tensors.quantization import QuantizationArgs
from pairwise import in_turns
from torch import Tensor, nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
)

from calipers.calibration.context import Calibration
from calipers.calibration.data import Batches
from calipers.calibration.pipelines import run_basic, run_datafree, run_sequential
from calipers.errors import TensorValueError
from calipers.recipes import load_recipe
from calipers.recipes.compiling import plan_for
from calipers.topology.model import decoder_layers

KINDS = ["llama", "qwen2", "mistral", "gemma3", "mixtral", "qwen2_moe"]
W8A8 = """
modifiers:
  QuantizationModifier:
    targets: [Linear]
    weights: {num_bits: 8, strategy: channel}
    input_activations: {num_bits: 8, strategy: tensor, dynamic: false}
"""


class TupleConfig(PretrainedConfig):
    model_type = "calipers_tuples"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden_size, self.num_hidden_layers, self.vocab_size = 16, 3, 64


class TupleLayer(nn.Module):
    """Takes positional arguments, and returns its hidden states in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, hidden: Tensor, shift: Tensor, *, factor: float) -> tuple[Tensor, str]:
        return hidden + torch.tanh(self.proj(hidden)) * factor + shift, "more"


class TupleModel(PreTrainedModel):
    """A projection before the layers, another behind them, and layers called differently."""

    config_class = TupleConfig

    def __init__(self, config: TupleConfig) -> None:
        super().__init__(config)
        self.embed, self.before = nn.Embedding(64, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList([TupleLayer() for _ in range(3)])
        self.behind, self.head = nn.Linear(16, 16), nn.Linear(16, 64)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = 1 if attention_mask is None else attention_mask[..., None]
        hidden, shift = self.before(self.embed(input_ids) * mask), torch.ones(16)
        for number, block in enumerate(self.blocks):
            hidden, _ = block(hidden, shift * number, factor=1.0 + number)
        return self.head(self.behind(hidden))


def tuple_model() -> TupleModel:
    torch.manual_seed(3)
    model = TupleModel(TupleConfig()).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def unfused(kind: str) -> Any:
    """A model whose experts are modules, as oneshot makes it."""
    model = small(kind)
    plan_for(model, load_recipe(W8A8))
    return model


def by_hand(model: Any, batches: Batches) -> dict[str, Tensor]:
    """The scales of static int8 inputs, from their definition; for models without experts."""
    with captured(model) as (inputs, _), torch.no_grad():
        for batch in batches:
            model(**batch)
    masks = [batch["attention_mask"].bool() for batch in batches]
    return {
        name: max(x[mask].abs().max() for x, mask in zip(seen, masks, strict=True)) / 127.5
        for name, seen in inputs.items()
    }


@pytest.mark.parametrize("kind", [*KINDS, "tuples"])
def test_layer_by_layer_is_the_whole_is_by_hand(kind: str) -> None:
    model = tuple_model() if kind == "tuples" else unfused(kind)
    batches = batches_of(samples(7), 3, "left")
    states = None if kind == "tuples" else STATIC
    plan = plan_of(
        model,
        weights=QuantizationArgs(
            num_bits=4, strategy="group", group_size=16, observer="imatrix_mse"
        ),
        outputs=STATIC.model_copy(update={"observer": "minmax"}),
        states=states,
    )
    before, tensors = anatomy(model), contents(model)
    policy: Any = "peers" if "experts" in " ".join(linears(model)) else "error"
    whole = calibrated(model, plan, run_basic, batches, policy=policy)
    layers = calibrated(model, plan, run_sequential, batches, policy=policy)
    assert {name for name, base in whole.qparams if base == "input"} == set(linears(model))
    if states:
        assert {name for name, base in whole.qparams if base == "k"} == set(attentions(model))
    assert same_qparams(whole, layers)
    assert whole.coverage == layers.coverage
    assert whole.errors == pytest.approx(layers.errors, abs=0)
    assert anatomy(model) == before
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "pipeline"),
    in_turns(["llama", "qwen2", "mistral", "gemma3", "tuples"], [run_basic, run_sequential]),
)
def test_the_scales_are_those_by_hand(kind: str, pipeline: Any) -> None:
    model = tuple_model() if kind == "tuples" else small(kind)
    batches = batches_of(samples(7), 3)
    expected = by_hand(model, batches)
    found = calibrated(model, plan_of(model), pipeline, batches)
    assert expected.keys() == set(linears(model))
    for name, scale in expected.items():
        assert torch.equal(found.qparams[name, "input"]["scale"], scale.reshape(1)), name
        weight = model.get_submodule(name).weight
        weight_scale = found.qparams[name, "weight"]["scale"]
        assert torch.equal(weight_scale, weight.abs().amax(1, keepdim=True) / 127.5)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    assert found.coverage.tokens == dict.fromkeys(linears(model), tokens)


def test_layers_see_what_earlier_layers_really_compute() -> None:
    """The hidden states between layers are those of the model as it is, not quantized ones."""
    model, batches = small("llama"), batches_of(samples(3), 1)
    coarse = plan_of(model, weights=QuantizationArgs(num_bits=2, strategy="channel"))
    fine = plan_of(model, weights=CHANNEL)
    first, second = (calibrated(model, p, run_sequential, batches) for p in (coarse, fine))
    for name in linears(model):
        mine, other = first.qparams[name, "input"], second.qparams[name, "input"]
        assert torch.equal(mine["scale"], other["scale"])


def test_only_layers_or_only_the_head() -> None:
    model, batches = small("llama"), batches_of(samples(3), 2)
    everything = plan_of(model)
    expected = by_hand(model, batches)
    for wanted in (["lm_head"], ["model.layers.1.mlp.up_proj"]):
        kept = tuple(module for module in everything.modules if module.name in wanted)
        plan = replace(everything, modules=kept)
        for pipeline in (run_basic, run_sequential):
            found = calibrated(model, plan, pipeline, batches)
            assert list(found.coverage.tokens) == wanted
            scale = found.qparams[wanted[0], "input"]["scale"]
            assert torch.equal(scale, expected[wanted[0]].reshape(1))


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    model, batches = small("llama"), batches_of(samples(2), 1)
    layer = model.model.layers[0]
    calls = []
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    layer.forward = forward
    expected = calibrated(model, plan_of(model), run_basic, batches)
    before = len(calls)
    found = calibrated(model, plan_of(model), run_sequential, batches)
    assert layer.forward is forward
    assert len(calls) > before
    assert same_qparams(found, expected)


@pytest.mark.parametrize("number", [0, 1])
def test_hooks_on_layers_that_change_what_they_see_do_so_once(number: int) -> None:
    model, batches = small("llama"), batches_of(samples(2), 1)
    layer = model.model.layers[number]
    layer.register_forward_pre_hook(lambda _, args: (args[0] * 2 + 1, *args[1:]))
    handle = layer.register_forward_hook(lambda _module, _args, result: result * 3 + 1)
    plan = plan_of(model)
    expected = calibrated(model, plan, run_basic, batches)
    found = calibrated(model, plan, run_sequential, batches)
    assert same_qparams(found, expected)
    assert len(layer._forward_pre_hooks) == len(layer._forward_hooks) == 1
    handle.remove()
    assert not layer._forward_hooks


@pytest.mark.parametrize("shared", ["", ".mlp.up_proj"])
def test_what_layers_share_sees_the_data_of_all(shared: str) -> None:
    model, batches = small("llama"), batches_of(samples(2), 1)
    model.set_submodule(f"model.layers.1{shared}", model.get_submodule(f"model.layers.0{shared}"))
    expected = calibrated(model, plan_of(model), run_basic, batches)
    found = calibrated(model, plan_of(model), run_sequential, batches)
    assert same_qparams(found, expected)


def test_sequential_names_the_batch_of_bad_values() -> None:
    model = small("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = torch.inf
    batches = batches_of([torch.tensor([1, 2]), torch.tensor([1, 63])], 1)
    before = anatomy(model)
    message = r"\(input of model\.layers\.0\.self_attn\.q_proj\) .* It was batch 1, the first one"
    with pytest.raises(TensorValueError, match=message):
        calibrated(model, plan_of(model), run_sequential, batches)
    assert anatomy(model) == before


def test_weights_alone_need_no_data() -> None:
    model = small("llama")
    plan = plan_of(model, inputs=None)
    assert not plan.needs_data
    found = calibrated(model, plan, run_datafree)
    assert {base for _, base in found.qparams} == {"weight"}
    assert found.coverage.tokens == {}


def test_layers_are_found_whatever_they_are_called() -> None:
    assert list(decoder_layers(tuple_model())) == ["blocks.0", "blocks.1", "blocks.2"]


class TypedLayer(TupleModel):
    """Hands what it does not know to a part, as models of transformers do."""

    def __init__(self, config: TupleConfig) -> None:
        super().__init__(config)
        self.types = TokenTypes()

    def forward(self, input_ids: Tensor, **others: Any) -> Tensor:
        return super().forward(self.types(input_ids, **others), others["attention_mask"])


class TokenTypes(nn.Module):
    """Takes no more than it names."""

    def forward(self, ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (ids + token_type_ids) % 64 * attention_mask


@pytest.mark.parametrize("pipeline", [run_basic, run_sequential])
def test_what_a_part_of_the_model_takes_is_passed_and_the_rest_is_not(pipeline: Any) -> None:
    torch.manual_seed(5)
    model = TypedLayer(TupleConfig()).eval()
    plain = batches_of(samples(5), 2)
    shifted = [{**batch, "token_type_ids": batch["input_ids"] % 2} for batch in plain]
    ids = [(batch["input_ids"] + batch["token_type_ids"]) for batch in shifted]
    by_hand = [
        {**batch, "input_ids": each, "token_type_ids": each * 0}
        for batch, each in zip(plain, ids, strict=True)
    ]
    extra = [{**batch, "length": batch["attention_mask"].sum(1)} for batch in shifted]
    plan = plan_of(model)
    found, wanted = (
        calibrated(model, plan, pipeline, Batches(tuple(each))) for each in (extra, by_hand)
    )
    assert same_qparams(found, wanted)


def test_nobody_is_solved_twice() -> None:
    model, batches = small("llama"), batches_of(samples(3), 1)
    plan = plan_of(model)
    solved: list[str] = []
    with Calibration(model, plan) as calibration:
        for part in run_sequential(run_of(calibration), batches):
            solved.extend(part.names)
    assert sorted(solved) == sorted(linears(model))
