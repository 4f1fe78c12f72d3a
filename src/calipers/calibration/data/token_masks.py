"""Masks that come with the data: which tokens the assistant wrote, or the loss counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from calipers.errors import DataError, Option, Words, not_allowed

MaskChoice = Literal["assistant"]
COLUMNS = ("assistant_masks", "assistant_mask", "loss_mask", "labels")
"""Columns that mark tokens; the first that is there is used."""
_IGNORED = -100  # in labels, as in torch.nn.CrossEntropyLoss


def check_mask(mask: object) -> None:
    """Refuse a choice of masks that there is not."""
    if mask not in (None, "assistant"):
        raise not_allowed("mask", mask, ["assistant"])


def marked_tokens(record: Mapping[str, Any], ids: Tensor) -> Tensor | None:
    """Return which tokens the masks of a record or batch mark, bool; None where there are none.

    >>> marked_tokens({"labels": [-100, 7]}, torch.tensor([6, 7]))
    tensor([False,  True])
    """
    column = next((each for each in COLUMNS if record.get(each) is not None), None)
    if column is None:
        return None
    try:
        found = torch.as_tensor(record[column]).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    marked: Tensor = found != (_IGNORED if column == "labels" else 0)
    return marked if marked.shape == ids.shape else None


def about_unused(ids: Tensor, counted: Tensor | None) -> tuple[Words, ...]:
    """Say that data has masks which are not used.

    :param ids: token ids without padding
    :param counted: which of them masks mark
    """
    hidden = ids if counted is None else ids[~counted]
    # Collators that pad with the end-of-text token hide that one everywhere: this is no mask.
    if counted is None or bool((hidden == hidden[:1]).all()):
        return ()
    return (
        "The data has masks of tokens (assistant_masks, loss_mask, or labels of -100) that are not "
        "used: all tokens count. " + Option("mask", "assistant") + " counts only what they mark.",
    )


def no_mask(where: str, what: str) -> DataError:
    """Refuse data that does not say which tokens count."""
    return DataError(
        f"{what}, and " + Option("mask", "assistant") + " counts only tokens that are marked",
        subject=where,
        hint=f"Give input_ids with one of {', '.join(COLUMNS)} (-100 where a token does not count) "
        "of the same length, or chats and a tokenizer whose chat template has {% generation %} "
        "blocks; or leave it out, and all tokens count.",
    )
