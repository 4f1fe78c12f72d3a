"""What all errors have in common."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class CalipersError(Exception):
    """Base of all errors that Calipers raises on purpose."""

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        # KeyError, a base of some subclasses, would show the repr of the message.
        return str(self.args[0]) if self.args else ""


class CalipersWarning(UserWarning):
    """Something works, but not as the user may think it does."""


class ConfigurationError(CalipersError, ValueError):
    """What the user asked for cannot be done by anybody."""

    exit_code = 2


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known word, or nothing.

    >>> did_you_mean("minmaxx", ["mse", "minmax"])
    " Did you mean 'minmax'?"
    """
    by_lower = {each.lower(): each for each in known}
    nearest = difflib.get_close_matches(word.lower(), list(by_lower), n=1)
    return f" Did you mean '{by_lower[nearest[0]]}'?" if nearest else ""


def listing(words: Iterable[str]) -> str:
    """Return words with commas between them."""
    return ", ".join(words)


def shortened(words: Iterable[str], most: int = 5) -> str:
    """List some words and count the rest.

    >>> shortened(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    words = list(words)
    rest = f" and {len(words) - most} more" if len(words) > most else ""
    return listing(words[:most]) + rest


def in_one_line(text: str, most: int = 400) -> str:
    """Return a text without line breaks, and without its end where it is long.

    >>> in_one_line("Error:\\n  wrong   key", most=9)
    'Error: wr…'
    """
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]}…"


def counted(number: int, what: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "module"), counted(2, "module")
    ('1 module', '2 modules')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def group_sizes_for(size: int) -> list[int]:
    """Return the usual group sizes that divide a dimension.

    >>> group_sizes_for(288)
    [16, 32, 96]
    """
    return [d for d in (16, 32, 64, 96, 128, 256) if size % d == 0]


def sizes_that_divide(size: int) -> str:
    """Return a sentence with group sizes that fit a dimension, or another way out."""
    divisors = group_sizes_for(size)
    if divisors:
        return f"Group sizes that divide it: {listing(map(str, divisors))}"
    return "Use strategy 'channel', or ignore this module"
