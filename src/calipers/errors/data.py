"""What several files say of data."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from calipers.errors.base import ConfigurationError, DataError
from calipers.errors.formatting import listing, nearest
from calipers.errors.text import Option, Text, Words


def empty_data(subject: str, problem: Words = "is empty") -> DataError:
    """Refuse data without a single token."""
    return DataError(
        Text.of(problem) + ": there is nothing to run the model on",
        subject=subject,
        hint="Give at least one text or list of token ids; several hundred make reliable figures.",
    )


def unreadable_record(place: str, problem: str) -> DataError:
    """Refuse a record from which no text and no token ids can be read."""
    return DataError(
        problem,
        subject=place,
        hint="A record is a text, a list of token ids, a chat (a list of messages with role and "
        "content), or an object with one of them in a column.",
    )


def several_splits(splits: Iterable[str], folder: str | None = None) -> DataError:
    """Refuse a dataset of several splits, of which none was chosen."""
    splits = list(splits)
    first = splits[0] if splits else "…"
    example = f"dataset[{first!r}]" if folder is None else f"'{folder}:{first}'"
    return DataError(
        f"The dataset has several splits: {listing(splits) or 'none'}",
        hint=f"Choose one of them: {example}.",
    )


def not_allowed(
    option: str, value: object, allowed: str | Collection[str], meant: str | None = None
) -> ConfigurationError:
    """Refuse a value outside the domain of an option: a description, or all its words.

    :param meant: the allowed word that the value stands for elsewhere; by default the nearest
    """
    if meant is None and not isinstance(allowed, str):
        meant = nearest(str(value), allowed)
    subject = Option(option, value)
    return ConfigurationError("is not allowed", subject=subject, meant=meant, allowed=allowed)


def check_whole_number(option: str, value: object, least: int | None = None) -> None:
    """Refuse a value of an option that is no whole number, or less than the least one."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least):  # type: ignore[operator]
        bound = "" if least is None else f", {least} or more"
        raise not_allowed(option, value, f"a whole number{bound}")


def no_meaning(option: str, value: object, here: str) -> ConfigurationError:
    """Refuse an option beside which something else was given."""
    subject = Option(option, value)
    return ConfigurationError(f"has no meaning for {here}", subject=subject, hint="Leave it out.")
