"""Errors and warnings: what they say, kept in parts, and how the message is made of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from calipers.errors.formatting import listing
from calipers.errors.text import Spelling, Text, Words, joined

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ENDS = (".", "?", "!", "…")


class Fields(TypedDict, total=False):
    """What can be said besides ``what``; see :class:`Context`."""

    subject: Words
    where: Words
    got: Words
    meant: str | None
    allowed: Words | Collection[str]
    hint: Words


@dataclass(frozen=True)
class Context:
    """What an error or a warning says. The message is made of it here, and nowhere else.

    :param what: what is wrong or, of a subject, what is wrong with it
    :param subject: what the first sentence is about: a file, a module, an option with its value
    :param where: the place, which stands before all else with a colon: a line of a recipe
    :param got: what came, as it is shown
    :param meant: the known word that is nearest to the one that came
    :param allowed: words, or a description of what would do
    :param hint: what to do next

    >>> str(Context("must be a whole number", "num_samples", got="'x'", hint="Give 512").text)
    "num_samples must be a whole number, got 'x'. Give 512."
    >>> str(Context("unknown key 'sceme'", where="line 3", meant="scheme", allowed=["scheme"]).text)
    "line 3: unknown key 'sceme'. Did you mean 'scheme'? Allowed: scheme."
    """

    what: Words
    subject: Words = ""
    where: Words = ""
    got: Words = ""
    meant: str | None = None
    allowed: Words | Collection[str] = ""
    hint: Words = ""

    @property
    def text(self) -> Text:
        """The message: place, subject and what is wrong with it; what was meant; the way out."""
        first = joined(" ", [self.subject, self.what])
        sentences = (
            joined(", got ", [first, self.got]),
            f"Did you mean '{self.meant}'?" if self.meant else "",
            joined(": ", ["Allowed", _listed(self.allowed)]) if self.allowed else "",
            self.hint,
        )
        return joined(": ", [self.where, _paragraph(sentences)])

    def as_dict(self, spelling: Spelling = str) -> dict[str, str]:
        """Return what is said as plain data, without what is not."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _listed(each).spelt(spelling) for name, each in found.items() if each}


def _listed(words: Words | Collection[str]) -> Text:
    return Text.of(words if isinstance(words, Words) else listing(words))


def _paragraph(sentences: Iterable[Words]) -> Text:
    """Put sentences side by side; after a list of several lines a new one begins."""
    whole = Text()
    for each in map(_ended, sentences):
        whole = joined("\n" if "\n" in str(whole) else " ", [whole, each])
    return whole


def _ended(words: Words) -> Text:
    """Return a sentence with its full stop; a list of several lines has none."""
    text = Text.of(words)
    is_open = text and "\n" not in str(text) and not str(text).endswith(_ENDS)
    return text + "." if is_open else text


class _WithContext:
    """An error or a warning with its context; takes what :class:`Context` takes."""

    context: Context
    args: tuple[Any, ...]

    def __init__(self, what: Words, **fields: Unpack[Fields]) -> None:
        self.context = Context(what, **fields)
        super().__init__(str(self.context.text))  # type: ignore[call-arg]

    def __str__(self) -> str:
        return str(self.context.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (type(self), self.args, vars(self))

    def spelt(self, spelling: Spelling) -> str:
        """Return the message, in which ``spelling`` says how options are spelt."""
        return self.context.text.spelt(spelling)

    def add_place(self, where: Words) -> None:
        """Say where it was found, before all else that is said."""
        self._change(where=joined(": ", [where, self.context.where]))

    def add_hint(self, hint: Words) -> None:
        """Add what to do next, or what else is known."""
        self._change(hint=joined(" ", [_ended(self.context.hint), hint]))

    def _change(self, **fields: Unpack[Fields]) -> None:
        self.context = replace(self.context, **fields)
        self.args = (str(self),)


def _rebuilt(kind: type[Any], args: tuple[Any, ...], state: dict[str, Any]) -> Any:
    """Make an error as it was before it was copied or sent, whatever its constructor takes."""
    made = kind.__new__(kind, *args)
    made.args = args
    vars(made).update(state)
    return made


def text_of(error: BaseException) -> Text:
    """Return what an exception says, with the options that it names if it is one of ours."""
    return error.context.text if isinstance(error, CalipersError) else Text(str(error))


class CalipersWarning(_WithContext, UserWarning):
    """Something works, but not as the user may think it does."""


class CalipersError(_WithContext, Exception):
    """Base of all errors that Calipers raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigurationError(CalipersError, ValueError):
    """What the user asked for cannot be done by anybody."""

    exit_code = 2


class DataError(CalipersError, ValueError):
    """Data that cannot be used."""

    exit_code = 2


class ModelLoadError(CalipersError, OSError):
    """A model or tokenizer that cannot be loaded."""

    exit_code = 2


class MeasurementsError(CalipersError, OSError):
    """A file of measurements that cannot be read."""

    exit_code = 2


class ModelRunError(CalipersError, RuntimeError):
    """A model that fails, or cannot be measured, while data runs through it."""

    exit_code = 3


class TensorValueError(CalipersError, ValueError):
    """Numbers that nothing can be computed from, such as NaN."""

    exit_code = 3


class CheckpointError(CalipersError, OSError):
    """A checkpoint, or another file, that cannot be written."""

    exit_code = 7


class CheckpointExistsError(CheckpointError, FileExistsError):
    """An output in whose place lies something that is not replaced."""
