"""Padding, batch size and the order of the data do not change what observers find."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from calibrating import (
    STATIC,
    Calibrated,
    attentions,
    batches_of,
    calibrated,
    captured,
    heads,
    joined,
    linears,
    plan_of,
    run,
    run_of,
    same_qparams,
    samples,
    show,
    small,
    solved,
)
from compressed_tensors.quantization import QuantizationArgs
from pairwise import in_turns
from torch import Tensor, nn

from calipers.calibration.context import Calibration
from calipers.calibration.pipelines import call_model, run_basic, run_datafree
from calipers.planning.plan import Plan

ACTIVATIONS = ["static_minmax", "histogram_mse", "percentile"]
WEIGHTS: list[dict[str, Any]] = [
    {"observer": "imatrix_mse"},
    {"observer": "optimal", "observer_kwargs": {"importance": "imatrix"}},
]


def order_free(activations: str, weights: dict[str, Any], model: nn.Module) -> Plan:
    return plan_of(
        model,
        weights=QuantizationArgs(num_bits=4, strategy="group", group_size=16, **weights),
        inputs=STATIC.model_copy(update={"observer": activations}),
        states=STATIC.model_copy(update={"observer": activations}),
        kind="kv_cache",
    )


def replayed(model: Any, plan: Plan, recorded: Any, size: int, side: str) -> Calibrated:
    """What observers make of recorded activations; padding is NaN, which nothing forgives."""
    inputs, outputs = recorded
    count = len(inputs["lm_head"])
    with Calibration(model, plan) as calibration:
        for start in range(0, count, size):
            rows = slice(start, start + size)
            mask = joined([x[0] for x in inputs["lm_head"][rows]], side)["attention_mask"]
            with calibration.batch(start, mask):
                for name in linears(model):
                    tensors = [x[0] for x in inputs[name][rows]]
                    model.get_submodule(name)(joined(tensors, side, torch.nan)["input_ids"])
                for name in attentions(model):
                    for base in "kv":
                        tensors = [x[0] for x in outputs[f"{name}.{base}_proj"][rows]]
                        states = joined(tensors, side, torch.nan)["input_ids"]
                        show(calibration, name, base, heads([states])[0], mask)
        return solved(calibration, run_datafree(run_of(calibration)))


@pytest.mark.parametrize(
    ("activations", "weights"),
    [*((name, WEIGHTS[0]) for name in ACTIVATIONS), ("static_minmax", WEIGHTS[1])],
    ids=[*ACTIVATIONS, "optimal"],
)
def test_recorded_activations_give_identical_scales(
    activations: str, weights: dict[str, Any]
) -> None:
    model = small("llama")
    rows = samples(18)
    with captured(model) as recorded:
        run(model, batches_of(rows, 1))
    plan = order_free(activations, weights, model)
    expected = replayed(model, plan, recorded, 1, "right")
    assert expected.coverage.tokens["lm_head"] == sum(map(len, rows))
    shuffled = tuple({n: list(reversed(x)) for n, x in each.items()} for each in recorded)
    for recording, size, side in (
        (recorded, 16, "right"),
        (recorded, 5, "left"),
        (shuffled, 4, "right"),
    ):
        found = replayed(model, plan, recording, size, side)
        assert same_qparams(found, expected), (size, side)
        assert found.coverage == expected.coverage


def test_products_of_channels_leave_padding_out() -> None:
    """Their sums round with the shape of a batch; NaN would spoil them altogether."""
    model = small("llama")
    with captured(model) as recorded:
        run(model, batches_of(samples(18), 1))
    hessian = {"observer": "optimal", "observer_kwargs": {"importance": "hessian"}}
    plan = order_free("static_minmax", hessian, model)
    expected, found = (
        replayed(model, plan, recorded, *how) for how in ((1, "right"), (16, "left"))
    )
    assert expected.errors.keys() == found.errors.keys() == set(linears(model))
    for name, error in expected.errors.items():
        assert found.errors[name] == pytest.approx(error, rel=1e-4)


def scales(solution: Calibrated) -> dict[tuple[str, str], Tensor]:
    return {key: found["scale"] for key, found in solution.qparams.items()}


@pytest.mark.parametrize(
    ("activations", "dtype"), in_turns(ACTIVATIONS, [torch.float64, torch.float32])
)
def test_padding_and_batch_size_change_only_the_last_bits(
    activations: str, dtype: torch.dtype
) -> None:
    model = small("qwen2", attn_implementation="sdpa").to(dtype)
    rows = samples(17)
    plan = order_free(activations, WEIGHTS[0], model)
    expected = calibrated(model, plan, run_basic, batches_of(rows, 1))
    for size, side in ((16, "right"), (3, "left")):
        found = calibrated(model, plan, run_basic, batches_of(rows, size, side))
        assert found.coverage == expected.coverage
        for key, scale in scales(expected).items():
            assert torch.allclose(scales(found)[key], scale, rtol=1e-5), (key, size, side)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_the_order_of_the_data_does_not_matter(activations: str) -> None:
    model, rows = small("llama"), samples(12)
    plan = order_free(activations, WEIGHTS[1], model)
    expected = calibrated(model, plan, run_basic, batches_of(rows, 1))
    order = torch.randperm(len(rows)).tolist()
    assert order != sorted(order)
    found = calibrated(model, plan, run_basic, batches_of([rows[i] for i in order], 1))
    assert same_qparams(found, expected)
    moving = plan_of(model, inputs=STATIC.model_copy(update={"observer": "minmax"}))
    first, second = (
        calibrated(model, moving, run_basic, batches_of(each, 1)) for each in (rows, rows[::-1])
    )
    assert not same_qparams(first, second)  # a moving average does care


def test_padding_of_any_content_is_never_seen() -> None:
    model = small("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 1e4  # the padding token
    rows = samples(4)
    plan = order_free("static_minmax", WEIGHTS[0], model)
    expected = calibrated(model, plan, run_basic, batches_of(rows, 1))
    found = calibrated(model, plan, run_basic, batches_of(rows, 4))
    for key, scale in scales(expected).items():
        assert torch.allclose(scales(found)[key], scale, rtol=1e-5), key
    unmasked = [{"input_ids": batch["input_ids"]} for batch in batches_of(rows, 4)]
    with Calibration(model, plan) as calibration:
        with calibration.batch(0):
            call_model(model, unmasked[0])
        calibration.finish(plan.names)
    assert calibration.tokens("lm_head") > sum(map(len, rows))
