"""Oneshot with data: what it needs, what it gathers, and what it leaves behind when it fails."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import (
    anatomy,
    batches_of,
    captured,
    linears,
    run,
    samples,
    small,
)
from families import build
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
)
from words import byte_tokenizer

from calipers import evaluate, oneshot
from calipers.errors import CalipersWarning, ConfigurationError, TensorValueError
from calipers.steps import IMatrixGatherer

W8A8 = """
modifiers:
  QuantizationModifier:
    targets: [Linear]
    weights: {num_bits: 8, strategy: channel}
    input_activations: {num_bits: 8, strategy: tensor, dynamic: false}
"""


@pytest.mark.parametrize("pipeline", ["datafree", "auto", "basic", "sequential"])
def test_a_plan_that_needs_data_says_so(pipeline: Any) -> None:
    model = small("llama")
    before = anatomy(model)
    message = (
        "The recipe needs data for 15 tensors (the first is "
        "model.layers.0.self_attn.q_proj.input), and there is no dataset. Pass dataset=…, or "
        "choose dynamic activations and observers that look at weights alone. plan.table() shows "
        "which tensors need data."
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        oneshot(model, W8A8, pipeline=pipeline)
    assert anatomy(model) == before


def quietly(*args: Any, **kwargs: Any) -> Any:
    """Oneshot, which says that this is little data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalipersWarning)
        return oneshot(*args, **kwargs)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_gathering_alone_leaves_the_sums(pipeline: Any) -> None:
    model, rows = small("qwen2"), samples(6)
    batches = batches_of(rows, 2)
    with captured(model) as (inputs, _):
        run(model, batches)
    masks = [batch["attention_mask"].bool() for batch in batches]
    ignored = "model.layers.0.mlp.down_proj"
    before = anatomy(model)
    quietly(model, [IMatrixGatherer(ignore=[ignored])], list(batches), pipeline=pipeline)
    for name in linears(model):
        module = model.get_submodule(name)
        if name == ignored:
            assert not hasattr(module, "_imatrix_sum")
            continue
        seen = torch.cat([x[m] for x, m in zip(inputs[name], masks, strict=True)]).double()
        assert torch.allclose(module._imatrix_sum.double(), seen.square().sum(0), rtol=1e-6)
        assert int(module._imatrix_count) == sum(map(len, rows))
        del module._imatrix_sum, module._imatrix_count
    assert anatomy(model) == before


def test_gathered_sums_are_what_a_later_observer_takes() -> None:
    rows, model = list(batches_of(samples(6), 2)), small("llama")
    others = list(batches_of(samples(6, seed=1), 2))
    recipe = W8A8.replace("channel}", "channel, observer: imatrix_mse}")
    at_once = quietly(copy.deepcopy(model), recipe, rows).model
    quietly(model, [IMatrixGatherer()], rows)
    quietly(model, recipe, others)
    for name in linears(model):
        mine, other = model.get_submodule(name), at_once.get_submodule(name)
        assert torch.equal(mine.weight_scale, other.weight_scale)


@pytest.mark.parametrize(("kind", "pipeline"), [("llama", "sequential"), ("mixtral", "basic")])
def test_bad_activations_leave_nothing_behind(pipeline: Any, kind: str, tmp_path: Path) -> None:
    model = small(kind)
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = torch.nan
    rows = [torch.tensor([1, 2, 3]), torch.tensor([4, 63, 5]), torch.tensor([63, 1])]
    before, out = anatomy(model), tmp_path / "out"
    message = r"\(input of model\.layers\.0\.self_attn\.q_proj\) .* It was batch 1, the first one"
    with pytest.raises(TensorValueError, match=message):
        quietly(model, W8A8, rows, pipeline=pipeline, shuffle=False, output_dir=out)
    assert anatomy(model) == before
    assert not list(tmp_path.iterdir())


def test_a_bad_weight_leaves_nothing_behind(tmp_path: Path) -> None:
    model = small("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[2, 3] = torch.inf
    before = anatomy(model)
    message = r"\(weight of model\.layers\.1\.mlp\.up_proj\) was given 1 non-finite value "
    with pytest.raises(TensorValueError, match=message):
        oneshot(model, "FP8_DYNAMIC", output_dir=tmp_path / "out")
    assert anatomy(model) == before
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_dropout_has_no_part_in_calibration(pipeline: Any) -> None:
    """A model that was being trained is calibrated as it will be used, and is left in training."""
    rows = list(batches_of(samples(6), 2))
    model = small("llama", attention_dropout=0.5)
    expected = quietly(copy.deepcopy(model), W8A8, rows, pipeline=pipeline).model
    model.train()
    quietly(model, W8A8, rows, pipeline=pipeline)
    assert all(module.training for module in model.modules())
    for name in linears(model):
        scale = model.get_submodule(name).input_scale
        assert torch.equal(scale, expected.get_submodule(name).input_scale), name


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_batches_for_a_trainer_run_as_others_do(pipeline: Any) -> None:
    """Labels are no input: with them the model would compute a loss of logits it does not have."""
    tokenizer = byte_tokenizer(pad=True)
    records = [tokenizer("once upon a time " * (1 + index % 5)) for index in range(32)]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    loader = DataLoader(records, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    assert "labels" in next(iter(loader))
    bare = [{k: v for k, v in batch.items() if k != "labels"} for batch in loader]
    options = {"num_samples": 32, "pipeline": pipeline, "progress": False}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "32 samples with", CalipersWarning)
        found, wanted = (oneshot(build(), "FP8", data, **options) for data in (loader, bare))
    for name in (name for name in linears(wanted.model) if name != "lm_head"):
        scales = [each.model.get_submodule(name).input_scale for each in (found, wanted)]
        assert torch.equal(*scales)
    scores = [evaluate(wanted.model, [], data, num_samples=32) for data in (loader, bare)]
    assert scores[0].as_dict() == scores[1].as_dict()
