"""Text → token ids, no more of them than are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
