"""The columns of a record: which hold its text, and which mark tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from calipers.errors import ANY, DataError, Option, nearest, not_allowed, unreadable_record

_BEFORE_PAIRS = (
    ("input_ids", "attention_mask"),
    ("input_ids",),
    ("messages",),
    ("conversations",),
    ("conversation",),
)
_AFTER_PAIRS = (("text",), ("content",), ("prompt",))
_QUESTIONS = ("instruction", "prompt", "question")
_ADDED = ("input", "context")
"""What a question is about; ``input`` is the question where there is no other."""
_ANSWERS = ("output", "response", "completion", "answer")


def columns_of(record: Mapping[str, Any], text_column: str | None, where: str) -> tuple[str, ...]:
    """Return the columns of a record that make up its text, chat or token ids.

    Of a question and its answer, the answer is the last one.

    >>> columns_of({"id": "a", "instruction": "Add.", "input": "1, 2", "output": "3"}, None, "here")
    ('instruction', 'input', 'output')
    """
    if text_column is not None:
        if text_column not in record:
            raise _no_text_column(where, text_column, record)
        return (text_column,)
    if {*record} == {"role", "content"}:
        problem = "is a single message of a chat; put the chat in a list: [chat]"
        raise unreadable_record(where, problem)
    pairs = [pair] if (pair := _pair(record, where)) else []
    for columns in (*_BEFORE_PAIRS, *pairs, *_AFTER_PAIRS):
        if all(column in record for column in columns):
            return columns
    texts = [column for column, value in record.items() if isinstance(value, str)]
    if len(texts) != 1:
        raise _no_text_column(where, None, record)
    return (texts[0],)


def _no_text_column(where: str, wanted: str | None, record: Mapping[str, Any]) -> DataError:
    return DataError(
        f"there is no column '{wanted}'" if wanted else "no column is known to hold the text",
        where=where,
        meant=nearest(wanted, record) if wanted else None,
        hint=f"Columns: {', '.join(record) or 'none'}. Name the one to read with "
        + Option("text_column", ANY),
    )


def _pair(record: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the columns of a question, what is added to it, and its answer; none without both."""
    answers = [column for column in _ANSWERS if column in record]
    asked = [column for column in _QUESTIONS if column in record]
    added = [column for column in _ADDED if column in record]
    if not asked and "input" in added:
        asked, added = ["input"], [column for column in added if column != "input"]
    if not asked or not answers:
        return ()
    if len(asked) > 1 or len(answers) > 1:
        raise _no_text_column(where, None, record)
    return (*asked, *added, *answers)


def is_pair(columns: Sequence[str]) -> bool:
    """Whether columns are those of a question and its answer."""
    return len(columns) > 1 and columns[-1] in _ANSWERS


def is_optional(column: str, columns: Sequence[str]) -> bool:
    """Whether a record may have nothing in one of its columns."""
    return column in _ADDED and column != columns[0]


def as_chat(texts: Sequence[str]) -> list[dict[str, str]]:
    """Make a chat of a question, what is added to it, and its answer."""
    *question, answer = texts
    turns = (("user", joined(question)), ("assistant", answer))
    return [{"role": role, "content": text} for role, text in turns if text.strip()]


def joined(texts: Sequence[str]) -> str:
    """Join texts by a blank line, or as they are where white space is already between them."""
    whole = ""
    for text in filter(str.strip, texts):
        apart = not whole or whole[-1].isspace() or text[0].isspace()
        whole += text if apart else f"\n\n{text}"
    return whole


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
        mask = torch.as_tensor(record[column]).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    marked: Tensor = mask != (_IGNORED if column == "labels" else 0)
    return marked if marked.shape == ids.shape else None


def about_unused(ids: Tensor, counted: Tensor | None) -> tuple[str, ...]:
    """Warn of masks that are not used, given token ids without padding and which are marked."""
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
