"""Sums that were gathered before are data: a second run needs none."""

from __future__ import annotations

import pytest
import torch
from models import small_llama

from calipers import IMatrixGatherer, QuantizationModifier, oneshot
from calipers.errors import ConfigurationError

SAMPLES = torch.randint(96, (64, 96), generator=torch.Generator().manual_seed(0))


def quantizer() -> QuantizationModifier:
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32}
    return QuantizationModifier(weights=weights, weight_observer="optimal", ignore="lm_head")


def test_gathered_first_and_quantized_later() -> None:
    torch.manual_seed(0)
    model = small_llama()
    together = small_llama()
    together.load_state_dict(model.state_dict())
    expected = oneshot(together, quantizer(), SAMPLES, num_calibration_samples=64).model
    with pytest.raises(ConfigurationError, match="needs data for 14 tensors"):
        oneshot(model, quantizer())
    oneshot(model, IMatrixGatherer(ignore="lm_head"), SAMPLES, num_calibration_samples=64)
    linear = model.get_submodule("model.layers.1.mlp.down_proj")
    assert int(linear._imatrix_count) == SAMPLES.numel()
    oneshot(model, IMatrixGatherer(ignore="lm_head"), SAMPLES[:48], num_calibration_samples=48)
    assert int(linear._imatrix_count) == SAMPLES[:48].numel()  # anew, not on top
    oneshot(model, IMatrixGatherer(ignore="lm_head"), SAMPLES, num_calibration_samples=64)
    later = oneshot(model, quantizer()).model
    assert not hasattr(linear, "_imatrix_sum")
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, later.get_parameter(name)), name
