"""Batches that the user made: checked, counted, and passed on as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from calipers.calibration.data.padding import COUNTED, Batch, counted_tokens
from calipers.calibration.data.records import check_ids, whole_numbers
from calipers.calibration.data.token_masks import COLUMNS, MaskChoice, marked_tokens, no_mask
from calipers.errors import DataError, empty_data


def check_batches(
    batches: Iterable[Any], num_samples: int, vocab_size: int | None, mask: MaskChoice | None = None
) -> Iterator[Batch]:
    """Go through a user's batches until there are enough rows.

    Masks that the data has are in them, whether they are used or not.

    :param mask: ``assistant`` where only tokens that are marked count: then every batch must have a
        mask, and those are passed over of which no token counts
    """
    rows = 0
    for index, given in enumerate(batches):
        batch = _as_batch(given, f"Batch {index}", vocab_size)
        if mask is not None:
            if COUNTED not in batch:
                raise no_mask(f"Batch {index}", f"has no mask (it has: {', '.join(given)})")
            if not batch[COUNTED].any():
                continue
        batch = _first_rows(batch, num_samples - rows)
        rows += len(batch["input_ids"])
        yield batch
        if rows >= num_samples:
            return
    if not rows:
        raise empty_data("The dataset", "has only batches of which no token is marked")


def _as_batch(given: Any, where: str, vocab_size: int | None) -> Batch:
    if not isinstance(given, Mapping):
        given = {"input_ids": given}
    if "input_ids" not in given:
        raise _wrong_batch(where, f"has no input_ids (it has: {', '.join(map(str, given))})")
    ids = _matrix(given["input_ids"], where, "input_ids")
    check_ids(ids, where, vocab_size)
    mask = torch.ones_like(ids)
    if given.get("attention_mask") is not None:
        mask = _matrix(given["attention_mask"], where, "attention_mask")
    if mask.shape != ids.shape:
        shapes = f"{tuple(ids.shape)} and an attention_mask of shape {tuple(mask.shape)}"
        raise _wrong_batch(where, f"has input_ids of shape {shapes}")
    if not mask.any():
        raise DataError(
            f"is all padding: its attention_mask of shape {tuple(mask.shape)} is zero everywhere",
            subject=where,
            hint="The mask is 1 for tokens that count; correct it, or leave the batch out.",
        )
    # Labels would have the model compute a loss, of logits that it is not asked for.
    others = {
        key: value
        for key, value in given.items()
        if isinstance(value, torch.Tensor) and key not in COLUMNS
    }
    marked = marked_tokens(given, ids)
    counted = {} if marked is None else {COUNTED: mask * marked}
    return {**others, "input_ids": ids, "attention_mask": mask, **counted}


def _wrong_batch(where: str, problem: str) -> DataError:
    return DataError(
        problem,
        subject=where,
        hint="A batch is a dict with input_ids of shape (rows, tokens) and, if there is padding, "
        "an attention_mask of the same shape.",
    )


def _matrix(value: Any, where: str, name: str) -> torch.Tensor:
    mask_like = isinstance(value, torch.Tensor) and name == "attention_mask"
    found = (value != 0).to(torch.int64).cpu() if mask_like else whole_numbers(value)
    if found is None or found.ndim != 2:
        shape = getattr(value, "shape", None)
        what = type(value).__name__ if shape is None else f"shape {tuple(shape)}"
        kind = "" if found is not None else ", not of whole numbers"
        raise _wrong_batch(where, f"has {name} of {what}{kind}")
    return found.to(torch.int64)


def _first_rows(batch: Batch, count: int) -> Batch:
    """The first rows of a batch; all of it where a tensor has no rows to choose from."""
    rows = len(batch["input_ids"])
    if rows <= count or any(not v.ndim or len(v) != rows for v in batch.values()):
        return batch
    first = {key: value[:count] for key, value in batch.items()}
    return first if counted_tokens(first).any() else batch
