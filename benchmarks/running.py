"""From a recipe to a checkpoint with either library, on the same batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from contenders import OURS  # says what to do if the peer is not installed
from llmcompressor.entrypoints.oneshot import oneshot as peer_oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier as PeerModifier
from recipes import Recipe
from torch import Tensor
from torch.utils.data import DataLoader

import calipers
from calipers.steps import QuantizationModifier


def run_oneshot(
    library: str,
    model: Any,
    recipe: Recipe,
    batches: Iterable[Tensor],
    tokenizer: Any,
    folder: Path | None = None,
) -> Any:
    """Quantize the model with a library, write it if there is a folder for it, and return it."""
    data = as_loader(batches)
    if library != OURS:
        return peer_oneshot(
            model=model,
            recipe=PeerModifier(**recipe),
            dataset=data,
            tokenizer=tokenizer,
            num_calibration_samples=len(data),
            output_dir=None if folder is None else str(folder),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", calipers.CalipersWarning)  # there may be little data
        result = calipers.oneshot(
            model,
            QuantizationModifier(**recipe),
            data,
            tokenizer=tokenizer,
            output_dir=folder,
            progress=False,
        )
    return result.model


def as_loader(batches: Iterable[Tensor]) -> DataLoader[Any]:
    """Hand out the batches, of shape (sequences, tokens), one after the other."""
    rows: Any = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in batches]
    return DataLoader(rows, batch_size=None)
