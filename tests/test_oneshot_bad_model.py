"""What bad models get: a clear error, the model as it was, nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import Untouched, build, saved, token_ids
from refusals import FAMILIES, FP8, modifiers, refused

import calipers
from calipers import errors

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
@pytest.mark.parametrize("scheme", ["FP8", "W4A16 imatrix", "kv"])
def test_activations_that_are_not_numbers(scheme: str, pipeline: str, output: Path) -> None:
    model = build()
    data = [[5] * 12, [5] * 12, [5, 6, 7] * 4, [5] * 12]
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    recipe, module = {
        "FP8": (FP8, "model.layers.0.self_attn.q_proj"),
        "W4A16 imatrix": (
            modifiers({"scheme": "W4A16", "ignore": ["lm_head"], "weight_observer": "imatrix_mse"}),
            "model.layers.0.self_attn.q_proj",
        ),
        "kv": (
            modifiers({"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}),
            "model.layers.0.self_attn",
        ),
    }[scheme]
    untouched = Untouched(model)
    with pytest.raises(errors.TensorValueError) as caught:
        calipers.oneshot(
            model,
            recipe,
            data,
            output_dir=output,
            pipeline=pipeline,
            shuffle=False,
            packing=False,
            progress=False,
        )
    assert module in str(caught.value)
    assert "batch 2" in str(caught.value)
    untouched.check()
    assert not output.parent.exists()


def test_a_weight_that_is_not_a_number(output: Path) -> None:
    model = build()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("inf")
    text = "model.layers.1.mlp.up_proj"
    refused(errors.TensorValueError, text, model, "W4A16", output=output)


def test_a_model_that_is_quantized_already(tmp_path: Path, output: Path) -> None:
    model = build()
    calipers.oneshot(model, "W4A16", output_dir=tmp_path / "first", progress=False)
    text = "quantized already: its config has a quantization_config"
    first = tmp_path / "first"
    refused(errors.ConfigurationError, text, first, "W8A16", output=output)
    refused(errors.ConfigurationError, text, str(first), FP8, output=output, pipeline="sequential")
    refused(errors.RecipeError, "already quantized", model, "W8A16", output=output)


def test_a_module_that_is_no_model_of_transformers(output: Path) -> None:
    text = "Cannot load a model from 'Linear': it is not a model of transformers. "
    with pytest.raises(errors.ModelLoadError, match=text):
        calipers.oneshot(torch.nn.Linear(2, 2), "W8A16", output_dir=output)
    assert not output.exists()


def test_a_path_without_a_model(tmp_path: Path, output: Path) -> None:
    (tmp_path / "empty").mkdir()
    text = (
        f"Cannot load a model from '{tmp_path / 'empty'}': there is no config.json in it. Give the "
        "folder or the name of a Hugging Face model."
    )
    refused(errors.ModelLoadError, text, tmp_path / "empty", "W4A16", output=output)
    text = f"Cannot load a model from '{tmp_path / 'nowhere'}': there is no such folder. "
    for given in (tmp_path / "nowhere", str(tmp_path / "nowhere")):
        refused(errors.ModelLoadError, text, given, "W4A16", output=output)


@pytest.mark.parametrize("pipeline", ["auto", "sequential"])
def test_a_model_whose_tensors_are_missing(pipeline: Any, tmp_path: Path, output: Path) -> None:
    folder = saved(build(), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    text = f"Cannot load a model from '{folder}'"
    refused(errors.ModelLoadError, text, folder, FP8, token_ids(), output=output, pipeline=pipeline)


@FAMILIES
def test_a_run_that_succeeds_is_noticed(family: str) -> None:
    """Otherwise no test that something is refused would say anything."""
    model = build(family)
    untouched = Untouched(model)
    calipers.oneshot(model, "W8A16", progress=False)
    with pytest.raises(AssertionError):
        untouched.check()
