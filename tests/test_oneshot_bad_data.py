"""What bad data gets: a clear error, the model as it was, nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build, token_ids
from refusals import FAMILIES, FP8, refused

from calipers import errors

pytestmark = pytest.mark.filterwarnings("ignore::calipers.errors.CalipersWarning")


@FAMILIES
def test_no_data_where_data_is_needed(family: str, output: Path) -> None:
    text = (
        "The recipe needs data for 14 tensors (the first is "
        "model.layers.0.self_attn.q_proj.input), and there is no dataset. Pass dataset=…, or"
    )
    if family == "mixtral":
        text = text[text.index("(the first") :]
    refused(errors.ConfigurationError, text, build(family), FP8, output=output)


def test_the_pipeline_without_data_where_data_is_needed(output: Path) -> None:
    text = (
        "The recipe needs data for 14 tensors (the first is "
        "model.layers.0.self_attn.q_proj.input), and pipeline='datafree' uses none. Choose another "
        "pipeline, or"
    )
    options = {"pipeline": "datafree", "output": output}
    refused(errors.ConfigurationError, text, build(), FP8, token_ids(), **options)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
@FAMILIES
@pytest.mark.parametrize("dataset", [[], [[]]], ids=["empty", "an empty row"])
def test_an_empty_dataset(dataset: Any, family: str, pipeline: str, output: Path) -> None:
    text = "there is nothing to run the model on"
    options = {"pipeline": pipeline, "output": output}
    refused(errors.DataError, text, build(family), FP8, dataset, **options)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
@FAMILIES
def test_a_dataset_of_padding(family: str, pipeline: str, output: Path) -> None:
    ids = token_ids(2, 8)
    batches = [{"input_ids": ids, "attention_mask": torch.zeros_like(ids)}]
    text = "is all padding: its attention_mask of shape (2, 8) is zero everywhere"
    options = {"pipeline": pipeline, "output": output}
    refused(errors.DataError, text, build(family), FP8, batches, **options)


def test_text_and_no_tokenizer(output: Path) -> None:
    refused(errors.DataError, "no tokenizer", build(), FP8, ["a text"], output=output)


def test_token_ids_that_the_model_does_not_have(output: Path) -> None:
    data = [[1, 2, 99999]]
    refused(errors.DataError, "99999", build(), FP8, data, output=output)
