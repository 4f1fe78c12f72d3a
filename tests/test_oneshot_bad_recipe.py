"""What bad recipes and options get: a clear error, the model as it was, nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import build, token_ids
from refusals import FAMILIES, FP8, modifiers, refused
from transformers import GPT2Config, GPT2LMHeadModel

from calipers import errors

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


@FAMILIES
def test_two_modifiers_for_one_tensor(family: str, output: Path) -> None:
    both = modifiers(
        {"targets": ["Linear"], "scheme": "W4A16"},
        {"targets": ["re:.*q_proj"], "scheme": "W8A16"},
    )
    refused(
        errors.RecipeError,
        "quantize 'model.layers.0.self_attn.q_proj.weight'. A tensor is quantized once: narrow the "
        "targets of one of them, or add the module to its ignore list.",
        build(family),
        both,
        output=output,
    )


@FAMILIES
def test_a_group_size_that_does_not_divide(family: str, output: Path) -> None:
    recipe = modifiers(
        {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 96},
        }
    )
    refused(
        errors.LayoutError,
        "model.layers.0.self_attn.q_proj, weight: 128 is not divisible by 96. Group sizes that "
        "divide it: 16, 32, 64, 128.",
        build(family),
        recipe,
        output=output,
    )


@FAMILIES
def test_no_module_matches(family: str, output: Path) -> None:
    recipe = modifiers({"targets": ["Conv2d"], "scheme": "W4A16"})
    refused(errors.RecipeError, "'Conv2d'", build(family), recipe, output=output)


def test_a_model_of_classes_that_cannot_be_quantized(output: Path) -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    text = (
        "The recipe quantizes nothing in GPT2LMHeadModel: no module that can be quantized matches. "
        "Linear and Embedding modules can be quantized; it has 8 Conv1D, which are not supported. "
        "Its classes: Conv1D, "
    )
    refused(errors.RecipeError, text, GPT2LMHeadModel(config).eval(), "W4A16", output=output)


@FAMILIES
def test_an_ignored_name_that_is_not_there(family: str, output: Path) -> None:
    recipe = modifiers({"targets": ["Linear"], "ignore": ["lm_haed"], "scheme": "W4A16"})
    text = "Did you mean 'lm_head'?"
    refused(errors.RecipeError, text, build(family), recipe, output=output)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"scheme": "W4A61"}, "Did you mean 'W4A16'?"),
        ({"scheme": "W4A16", "weight_observer": "mimnax"}, "Did you mean 'minmax'?"),
        ({"scheme": "W4A16", "weight_observer": {"name": "mse", "maxshrnk": 0.2}}, "'maxshrink'"),
        ({"scheme": "W4A16", "weight_observer": {"name": "mse", "maxshrink": 7}}, "maxshrink"),
        ({"scheme": "W4A16", "taregts": ["Linear"]}, "Did you mean 'targets'?"),
        ({"weights": {"num_bits": 4, "symetric": True}}, "Did you mean 'symmetric'?"),
    ],
)
def test_words_that_nobody_knows(options: dict[str, Any], text: str, output: Path) -> None:
    refused(errors.CalipersError, text, build(), modifiers(options), output=output)


def test_the_line_of_a_recipe_is_named(output: Path) -> None:
    recipe = "modifiers:\n  QuantizationModifier:\n    scheme: W4A16\n    ingore: [lm_head]\n"
    refused(errors.RecipeError, "line 4", build(), recipe, output=output)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"pipeline": "sequental"},
            "pipeline='sequental' is not allowed. Did you mean 'sequential'? Allowed: auto, "
            "datafree, basic, sequential.",
        ),
        (
            {"on_unseen": "peer"},
            "on_unseen='peer' is not allowed. Did you mean 'peers'? Allowed: error, weights_only, "
            "peers.",
        ),
        ({"pipeline": None}, "pipeline=None is not allowed. Allowed: auto"),
        ({"device": "cudda"}, "device='cudda' cannot be used: "),
        ({"device": "meta"}, "device='meta' cannot be used: "),
        ({"max_shard_size": "large"}, "max_shard_size='large' is no size"),
        ({"num_calibration_samples": 0}, "num_samples=0 is not allowed"),
        ({"batch_size": -1}, "batch_size=-1 is not allowed"),
        ({"max_seq_length": 0}, "max_seq_length=0 is not allowed"),
    ],
)
def test_options_outside_their_domain(options: dict[str, Any], text: str, output: Path) -> None:
    given = {"output": output, **options}
    refused(errors.ConfigurationError, text, build(), FP8, token_ids(), **given)
