"""Tokenize records: texts, chats and token ids."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from calipers.calibration.data.columns import (
    COLUMNS,
    MaskChoice,
    about_unused,
    as_chat,
    columns_of,
    is_optional,
    is_pair,
    joined,
    marked_tokens,
    no_mask,
)
from calipers.errors import ANY, DataError, Option, library_errors, unreadable_record


@dataclass(frozen=True, eq=False)
class Sample:
    """Token ids of one sample, or of a document that samples are cut from.

    :param counted: which of them count, (tokens,) bool; None where all do
    """

    ids: Tensor
    counted: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Sample:
        """Return some of its tokens."""
        return Sample(self.ids[part], None if self.counted is None else self.counted[part])

    @property
    def num_counted(self) -> int:
        """How many of its tokens count."""
        return len(self) if self.counted is None else int(self.counted.sum())

    @classmethod
    def joined(cls, samples: Sequence[Sample]) -> Sample:
        """Put samples one after another."""
        ids = torch.cat([sample.ids for sample in samples])
        if all(sample.counted is None for sample in samples):
            return cls(ids)
        marks = [
            torch.ones_like(sample.ids, dtype=torch.bool)
            if sample.counted is None
            else sample.counted
            for sample in samples
        ]
        return cls(ids, torch.cat(marks))


_CHARACTERS = 16
"""So many characters are tokenized for each token that is needed; most tokens have fewer."""

_MARGIN = 256


def first_token_ids(
    tokenize: Callable[[str], Sequence[int]], text: str, enough: int | None
) -> Sequence[int]:
    """Return the token ids of a text; of a very long one, more than ``enough`` of the first.

    The time of a tokenizer grows faster than its text: 40 MB in one piece take minutes. Where a
    text is cut, the tokens before the cut may be others; those that are returned lie at least
    as far from it as from the beginning.

    :param enough: how many of the first ids are of interest; None for all

    >>> first_token_ids(lambda text: [*map(ord, text)], "ab" * 100_000, enough=3)
    [97, 98, 97, 98]
    """
    if enough is None:
        return tokenize(text)
    size = _CHARACTERS * (enough + _MARGIN)
    while size < len(text):
        ids = tokenize(text[:size])
        if len(ids) >= 2 * enough + _MARGIN:
            return ids[: enough + 1]
        size *= 4
    return tokenize(text)


_ROLES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard"), "assistant")}
_NO_TEMPLATE = (
    "The tokenizer has no chat template: the messages of a chat are joined by blank lines. For a "
    "chat model, use its own tokenizer."
)
_NOTHING = torch.empty(0, dtype=torch.int64)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class RecordTokenizer:
    """Turns records into token ids.

    :param columns: which columns of a record to read, where records have columns
    :param notes: what the user should know about how records are read
    :param mask: which tokens count: ``assistant``, those that are marked, or None, all
    """

    tokenizer: Any = None
    columns: tuple[str, ...] = ()
    vocab_size: int | None = None
    notes: tuple[str, ...] = ()
    mask: MaskChoice | None = None

    @classmethod
    def of(
        cls,
        first: tuple[str, Any],
        tokenizer: Any,
        text_column: str | None,
        vocab_size: int | None,
        mask: MaskChoice | None = None,
    ) -> RecordTokenizer:
        """Look at the first record, given with its place: it shows which columns there are."""
        place, record = first
        listed = isinstance(record, Mapping)
        columns = columns_of(record, text_column, place) if listed else ()
        shown = record[columns[0]] if columns else record
        untold = tokenizer is not None and not _has_template(tokenizer) and _is_chat(shown)
        notes: tuple[str, ...] = (_NO_TEMPLATE,) if untold else ()
        if mask is None and columns[:1] == ("input_ids",) and not {*COLUMNS}.isdisjoint(record):
            seen = _with_mask(record, columns, place)
            notes += about_unused(seen.ids, seen.counted)
        return cls(tokenizer, columns, vocab_size, notes, mask)

    @property
    def separator(self) -> int | None:
        """The token that ends a text, if there is one."""
        return special_id(self.tokenizer, "eos_token_id", self.vocab_size)

    def sample(self, record: Any, where: str, enough: int | None = None) -> Sample:
        """Return the tokens of a record, and which of them count."""
        if self.mask is None:
            return Sample(self.token_ids(record, where, enough))
        columns: tuple[str, ...] = ()
        if isinstance(record, Mapping):
            columns = self.columns or columns_of(record, None, where)
        if columns[:1] == ("input_ids",):
            self._value(record, where)  # refuses what cannot be read
            sample = _with_mask(record, columns, where)
            if sample.counted is None:
                raise no_mask(where, f"has no mask (it has: {', '.join(record)})")
        else:
            value = self._value(record, where) if columns else record
            if hasattr(value, "__len__") and not len(value):
                return Sample(_NOTHING)
            if not _is_chat(value):
                raise no_mask(where, "has no mask")
            if not _has_template(self.tokenizer):
                raise no_mask(where, "is a chat, for which the tokenizer has no chat template")
            encoded = self._templated(
                value, where, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
            sample = Sample(ids, torch.tensor(encoded["assistant_masks"], dtype=torch.bool))
        check_ids(sample.ids, where, self.vocab_size)
        return sample

    def token_ids(self, record: Any, where: str, enough: int | None = None) -> torch.Tensor:
        """Return the token ids of a record, (tokens,) int64; none for an empty one.

        :param enough: how many of the first ids are of interest, so that the rest of a very long
            text need not be tokenized; None for all
        """
        if isinstance(record, Mapping):
            record = self._value(record, where)
        if _is_chat(record) and not _has_template(self.tokenizer):
            contents = [_message(message, where).get("content") for message in record]
            if not all(isinstance(content, str) for content in contents):
                problem = "the tokenizer has no chat template for messages that are not plain text"
                raise _unusable_chat(where, problem)
            record = joined([str(content) for content in contents])
        if isinstance(record, str):
            ids = self._tokenized(record, where, enough) if record.strip() else _NOTHING
        elif _is_chat(record):
            text = str(self._templated(record, where, tokenize=False))
            ids = self._tokenized(text, where, enough, special=False)
        else:
            ids = _as_ids(record, where)
        check_ids(ids, where, self.vocab_size)
        return ids.to(torch.int64)

    def _value(self, record: Mapping[str, Any], where: str) -> Any:
        columns = self.columns or columns_of(record, None, where)
        values = [record.get(column) for column in columns]
        for column, value in zip(columns, values, strict=True):
            if value is None and not is_optional(column, columns):
                raise unreadable_record(
                    where, f"has nothing in '{column}' (it has: {', '.join(record)})"
                )
        if len(values) == 1:
            return values[0]
        if columns[0] == "input_ids":
            ids, mask = (_as_ids(value, where) for value in values)
            return _counted(ids, mask, where)
        values = [value for value in values if value is not None]
        texts = [value for value in values if isinstance(value, str)]
        if len(texts) == len(values):
            chats = is_pair(columns) and _has_template(self.tokenizer)
            return (as_chat(texts) or "") if chats else joined(texts)
        if all(_is_chat(value) for value in values):
            return [message for chat in values for message in chat or ()]
        kinds = " and ".join(type(value).__name__ for value in values)
        raise unreadable_record(where, f"has {' and '.join(columns)} of types {kinds}")

    def _tokenized(
        self, text: str, where: str, enough: int | None, *, special: bool = True
    ) -> torch.Tensor:
        if self.tokenizer is None:
            raise DataError(
                "is text, and no tokenizer was given",
                subject=where,
                hint="Pass "
                + Option("tokenizer", ANY)
                + " (the folder or the name of the one that belongs to the model), or token ids "
                "instead of text.",
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            problem = f"has half a character (a surrogate) at position {error.start}"
            raise unreadable_record(where, problem) from None

        def tokenize(part: str) -> list[int]:
            encoded = self.tokenizer(part, add_special_tokens=special, verbose=False)
            ids: list[int] = encoded["input_ids"]
            return ids

        def error_of(words: str) -> DataError:
            return DataError(
                f"The tokenizer cannot turn {where} into tokens: {words}",
                hint="Does it belong to this model? Compare its files with the original, or pass "
                + Option("tokenizer", ANY),
            )

        with library_errors(error_of):
            return torch.tensor(first_token_ids(tokenize, text, enough), dtype=torch.int64)

    def _templated(self, chat: Iterable[Mapping[str, Any]], where: str, **options: Any) -> Any:
        messages = [_message(message, where) for message in chat]
        try:
            if options["tokenize"] and not _GENERATION.search(self.tokenizer.get_chat_template()):
                raise no_mask(where, "is a chat whose template has no {% generation %} blocks")
            return self.tokenizer.apply_chat_template(messages, **options)
        except DataError:
            raise
        except Exception as error:  # templates are programs of others: anything can come
            problem = f"the chat template refused it: {error}"
            raise _unusable_chat(where, problem.rstrip(".")) from error


def _unusable_chat(where: str, problem: str) -> DataError:
    return DataError(
        f"is a chat, and {problem}",
        subject=where,
        hint="Use the tokenizer of a chat model, set its chat_template, or name a column of plain "
        "text with " + Option("text_column", ANY),
    )


def special_id(tokenizer: Any, name: str, vocab_size: int | None) -> int | None:
    """Return a special token of a tokenizer, if it has one that the model knows."""
    token = getattr(tokenizer, name, None)
    known = isinstance(token, int) and token >= 0 and (vocab_size is None or token < vocab_size)
    return token if known else None


def check_ids(ids: torch.Tensor, where: str, vocab_size: int | None) -> None:
    """Refuse token ids that are not in the vocabulary."""
    wrong = ids < 0
    if vocab_size is not None:
        wrong = wrong | (ids >= vocab_size)
    if wrong.any():
        *row, position = wrong.nonzero()[0].tolist()
        place = (f"row {row[0]}, " if row else "") + f"position {position}"
        known = "0 and up" if vocab_size is None else f"0 to {vocab_size - 1}"
        raise DataError(
            f"has the token id {int(ids[wrong][0])} at {place}",
            subject=where,
            hint=f"Allowed token ids: whole numbers, {known}. Does the tokenizer belong to this "
            "model?",
        )


def whole_numbers(value: Any) -> torch.Tensor | None:
    """Return a list or an array as a tensor of integers, or None where it is none."""
    try:
        tensor = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    integral = not tensor.is_floating_point() and not tensor.is_complex()
    return tensor if integral and tensor.dtype != torch.bool else None


def _as_ids(value: Any, where: str) -> torch.Tensor:
    kind = type(value).__name__
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        raise unreadable_record(where, f"is of type {kind}")
    if getattr(value, "ndim", 1) != 1:
        raise unreadable_record(where, f"is a {kind} of shape {tuple(value.shape)}")
    if not len(value):
        return _NOTHING
    ids = whole_numbers(value)
    if ids is None or ids.ndim != 1:
        kinds = {str(getattr(element, "dtype", type(element).__name__)) for element in value}
        problem = f"is a {kind} of {' and '.join(sorted(kinds))}, not of whole numbers"
        raise unreadable_record(where, problem)
    return ids


def _with_mask(record: Mapping[str, Any], columns: tuple[str, ...], where: str) -> Sample:
    """Return the token ids of a record without padding, and those of them that it marks."""
    ids = _as_ids(record["input_ids"], where).to(torch.int64)
    marked = marked_tokens(record, ids)
    if "attention_mask" not in columns:
        return Sample(ids, marked)
    attention = _as_ids(record["attention_mask"], where)
    kept = None if marked is None else _counted(marked, attention, where)
    return Sample(_counted(ids, attention, where), kept)


def _counted(ids: torch.Tensor, mask: torch.Tensor, where: str) -> torch.Tensor:
    """Return what belongs to tokens that are not padding."""
    if ids.shape != mask.shape:
        raise unreadable_record(
            where, f"has {len(ids)} input_ids and an attention_mask of {len(mask)}"
        )
    return ids[mask != 0]


def _is_chat(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return listed and len(value) > 0 and all(isinstance(message, Mapping) for message in value)


def _has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _message(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A message with role and content; the other habit, from and value, is translated."""
    if "from" in message and "value" in message:
        return {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"]}
    if "role" not in message:
        raise unreadable_record(
            where, f"has a message without a role (it has: {', '.join(message)})"
        )
    return message
