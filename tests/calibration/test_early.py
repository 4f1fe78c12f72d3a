"""Modules that have seen nothing are noticed while the data runs."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from models import small_mixtral

from calipers import oneshot
from calipers.calibration.coverage import no_tokens
from calipers.errors import CalipersWarning, UnseenModulesError

RECIPE = """
modifiers:
  QuantizationModifier:
    ignore: [lm_head]
    weights: {num_bits: 8, strategy: channel}
    input_activations: {num_bits: 8, strategy: tensor}
"""


def warned(**options: Any) -> list[str]:
    """What is said of a layer with 8 experts and data of one token, which only 2 of them see."""
    torch.manual_seed(0)
    model = small_mixtral(num_hidden_layers=1, num_local_experts=8)
    data = torch.full((40, 8), 7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CalipersWarning)
        with suppress(UnseenModulesError):
            oneshot(model, RECIPE, data, num_calibration_samples=40, **options)
    return [text for each in caught if "have seen no token" in (text := str(each.message))]


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_a_warning_comes_after_a_tenth_of_the_data(pipeline: str) -> None:
    (told,) = warned(pipeline=pipeline)
    start, _, rest = told.partition(": ")
    assert start == "18 of 28 modules have seen no token in the first 4 of 40 batches"
    assert rest.endswith(
        "and 13 more. If that stays so, the run fails at its end. calibrate_all_experts=True shows "
        "all tokens to all experts; on_unseen='weights_only' or on_unseen='peers' does without."
    )


def test_whoever_has_chosen_what_to_do_is_not_told() -> None:
    assert warned(on_unseen="weights_only") == []
    assert warned(calibrate_all_experts=True) == []


def test_the_error_names_the_ways_out() -> None:
    message = str(no_tokens(["a.b"], "error"))
    assert "(calibrate_all_experts=True)" in message
    assert "on_unseen='weights_only'" in message
    assert "on_unseen='peers'" in message
