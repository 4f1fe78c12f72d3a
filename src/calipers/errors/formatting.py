"""Words and numbers in messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is nearest to one that was mistyped, if one is near.

    >>> nearest("minmaxx", ["mse", "minmax"])
    'minmax'
    """
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=1)
    return by_lower[found[0]] if found else None


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


def first_line(text: str) -> str:
    """Return the first line of what a library says, without its full stop.

    >>> first_line("No such file.\\nCheck the path."), first_line("")
    ('No such file', 'no reason is given')
    """
    return (text.strip().splitlines() or ["no reason is given"])[0].rstrip(".")


def printable(text: str) -> str:
    r"""Return a text that cannot steer a terminal.

    Control characters (C0 and C1, so also ESC), marks that change the direction of writing, and
    what else has no shape of its own are replaced. Lines and tabs stay.

    >>> printable("a\x1b[31m\u202e"), printable("über\n\t1")
    ('a�[31m�', 'über\n\t1')
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else "�" for each in text)


def counted(number: int, what: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "module"), counted(2, "module")
    ('1 module', '2 modules')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def format_size(size: float | None) -> str:
    """Return a number of bytes with a unit.

    >>> format_size(12), format_size(657_664), format_size(16.06e9), format_size(None)
    ('12 bytes', '658 kB', '16.1 GB', '–')
    """
    if size is None:
        return "–"
    power = 0
    while abs(size) >= 999.5 and power < len(_UNITS) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.3g} {_UNITS[power]}"


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
