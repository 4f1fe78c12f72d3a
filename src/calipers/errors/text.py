"""Texts that name options, which Python and the command line spell differently, and their words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

ANY = "…"
"""The value of an option that can have any."""

_UNITS = ("bytes", "kB", "MB", "GB", "TB")


class _Marked(str):
    """A string with something in it that has another spelling; it stays when strings are added."""

    __slots__ = ()

    def __add__(self, other: str) -> Text:
        return Text(self, other)

    def __radd__(self, other: str) -> Text:
        return Text(other, self)


class Option(_Marked):
    """An option of a function, with its value if that matters; as a string, it is Python.

    :param value: ``...`` for the option itself
    :param owner: the class that it belongs to, where it is not a function's

    >>> print(Option("overwrite", True), Option("dataset", ANY), Option("dtype"))
    overwrite=True dataset=… dtype
    """

    name: str
    value: Any
    owner: str

    def __new__(cls, name: str, value: Any = ..., owner: str = "") -> Self:
        """Spell the option."""
        spelt = f"{owner}.{name}" if owner else name
        if value is not ...:
            spelt += f"={ANY if value == ANY else repr(value)}"
        option = super().__new__(cls, spelt)
        option.name, option.value, option.owner = name, value, owner
        return option


class Call(_Marked):
    """A call of Python, in whose place there may be a command.

    >>> print(Call("plan.table"))
    plan.table()
    """

    name: str

    def __new__(cls, name: str) -> Self:
        """Spell the call."""
        call = super().__new__(cls, f"{name}()")
        call.name = name
        return call


Spelling = Callable[[Any], str]
"""Says how an :class:`Option` or a :class:`Call` is spelt; ``str`` does it in Python."""


class Text(_Marked):
    """A string that knows which parts of it are options and calls; as it is, it is Python.

    A string and an option make a text:

    >>> text = "Choose another one, or pass " + Option("overwrite", True) + " to replace it."
    >>> print(text)
    Choose another one, or pass overwrite=True to replace it.
    >>> text.spelt(lambda option: f"--{option.name}")
    'Choose another one, or pass --overwrite to replace it.'
    """

    parts: tuple[str, ...]

    def __new__(cls, *parts: str) -> Self:
        """Put strings, options, calls and texts together."""
        text = super().__new__(cls, "".join(parts))
        text.parts = tuple(piece for part in parts for piece in getattr(part, "parts", (part,)))
        return text

    def spelt(self, spelling: Spelling) -> str:
        """Return the text as a string, in which ``spelling`` says how options are spelt."""
        return "".join(
            spelling(part) if isinstance(part, (Option, Call)) else part for part in self.parts
        )

    def to_data(self) -> list[Any]:
        """Return the text as plain data, which can be sent to another process."""
        return [
            {name: value for name, value in vars(part).items() if value is not ...}
            if isinstance(part, (Option, Call))
            else part
            for part in self.parts
        ]

    @classmethod
    def from_data(cls, data: Iterable[Any]) -> Text:
        """Return the text that was made plain data.

        >>> print(Text.from_data((Option("seed", 1) + " is odd").to_data()))
        seed=1 is odd
        """
        return cls(
            *(
                part if isinstance(part, str) else (Option if "owner" in part else Call)(**part)
                for part in data
            )
        )


def joined(separator: str, texts: Iterable[str]) -> Text:
    """Return texts with something between them; empty ones are left out.

    >>> print(joined(", ", ["a", "", Option("seed")]))
    a, seed
    """
    whole = Text()
    for each in filter(None, texts):
        whole = whole + separator + each if whole else Text(each)
    return whole


# str and numbers in messages


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
    """Return a number with its noun: ``1 module``, ``2 modules``."""
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
