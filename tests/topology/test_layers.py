"""Which modules are the decoder layers of a model."""

from __future__ import annotations

import re

import pytest
from calibrating import small
from torch import nn
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

from calipers.errors import ConfigurationError
from calipers.topology.model import decoder_layers


def test_layers_are_found() -> None:
    model = small("llama")
    assert list(decoder_layers(model)) == ["model.layers.0", "model.layers.1"]
    assert decoder_layers(model)["model.layers.1"] is model.model.layers[1]
    # A longer list of something else is not the stack of layers.
    model = small("mixtral", num_local_experts=8)
    model.extra = nn.ModuleList([nn.Linear(1, 1) for _ in range(9)])
    assert list(decoder_layers(model)) == ["model.layers.0", "model.layers.1"]


def test_the_layers_are_those_of_the_decoder() -> None:
    """Others may be more: here those of the images, which text does not reach."""
    text = small("llama").config
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=0)
    model = LlavaForConditionalGeneration(config)
    names = ["model.language_model.layers.0", "model.language_model.layers.1"]
    assert list(decoder_layers(model)) == names


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.ModuleDict({"a": nn.ModuleList()})],
)
def test_a_model_without_layers_is_refused(model: nn.Module) -> None:
    message = (
        f"{type(model).__name__} has no ModuleList of layers, so it cannot be calibrated layer by "
        "layer. Pass pipeline='basic'."
    )
    with pytest.raises(ConfigurationError, match=f"^{re.escape(message)}$"):
        decoder_layers(model)
