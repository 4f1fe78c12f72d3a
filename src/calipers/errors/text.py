"""Texts that name options, which a function of Python and a command spell in different ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

ANY = "…"
"""The value of an option that can have any."""


class _Term:
    """What is not spelt everywhere in the same way; put to a string, it makes a text."""

    def __add__(self, other: Words) -> Text:
        return Text(self) + other

    def __radd__(self, other: str) -> Text:
        return Text(other, self)

    def to_data(self) -> dict[str, Any]:
        """Return what it is as plain data."""
        return {name: value for name, value in vars(self).items() if value is not ...}


@dataclass(frozen=True)
class Option(_Term):
    """An option of a function, with its value if that matters.

    :param value: left out for the option itself
    :param owner: the class that it belongs to, where it is not a function's

    >>> str(Option("overwrite", True)), str(Option("dataset", ANY)), str(Option("dtype"))
    ('overwrite=True', 'dataset=…', 'dtype')
    """

    name: str
    value: Any = ...
    owner: str = ""

    @property
    def has_value(self) -> bool:
        """Whether it is named with a value."""
        return self.value is not ...

    def __str__(self) -> str:
        name = f"{self.owner}.{self.name}" if self.owner else self.name
        if not self.has_value:
            return name
        return f"{name}={ANY if self.value == ANY else repr(self.value)}"


@dataclass(frozen=True)
class Call(_Term):
    """A call of Python, in whose place there may be a command.

    >>> str(Call("plan.table"))
    'plan.table()'
    """

    name: str

    def __str__(self) -> str:
        return f"{self.name}()"


Spelling: TypeAlias = Callable[[Any], str]
"""Says how an :class:`Option` or a :class:`Call` is spelt; ``str`` does it in Python."""


class Text:
    """Strings, and between them what is not spelt everywhere in the same way.

    A string and an option make a text; as a string, it is spelt in Python.

    >>> text = "Choose another one, or pass " + Option("overwrite", True) + " to replace it."
    >>> str(text)
    'Choose another one, or pass overwrite=True to replace it.'
    >>> text.spelt(lambda option: f"--{option.name}")
    'Choose another one, or pass --overwrite to replace it.'
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: str | _Term) -> None:
        self.parts = parts

    @classmethod
    def of(cls, words: Words) -> Text:
        """Return words as a text."""
        return words if isinstance(words, Text) else cls(words)

    def __add__(self, other: Words) -> Text:
        return Text(*self.parts, *Text.of(other).parts)

    def __radd__(self, other: str) -> Text:
        return Text(other, *self.parts)

    def __str__(self) -> str:
        return self.spelt(str)

    def __repr__(self) -> str:
        return f"Text{self.parts!r}"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, (str, Text)) else NotImplemented

    def __hash__(self) -> int:
        return hash(str(self))

    def __bool__(self) -> bool:
        return bool(str(self))

    def spelt(self, spelling: Spelling) -> str:
        """Return the text as a string, in which ``spelling`` says how options are spelt."""
        return "".join(part if isinstance(part, str) else spelling(part) for part in self.parts)

    def to_data(self) -> list[Any]:
        """Return the text as plain data, which can be sent to another process."""
        return [each if isinstance(each, str) else each.to_data() for each in self.parts]

    @classmethod
    def from_data(cls, data: Iterable[Any]) -> Text:
        """Return the text that was made plain data.

        >>> str(Text.from_data((Option("seed", 1) + " is odd").to_data()))
        'seed=1 is odd'
        """
        return cls(*(each if isinstance(each, str) else _term(each) for each in data))


Words: TypeAlias = str | Option | Call | Text
"""What a text can be made of."""


def _term(fields: dict[str, Any]) -> _Term:
    return Option(**fields) if "owner" in fields else Call(**fields)


def joined(separator: str, words: Iterable[Words]) -> Text:
    """Return texts with something between them; empty ones are left out.

    >>> str(joined(", ", ["a", "", Option("seed")]))
    'a, seed'
    """
    whole = Text()
    for each in filter(None, map(Text.of, words)):
        whole = whole + separator + each if whole else each
    return whole
