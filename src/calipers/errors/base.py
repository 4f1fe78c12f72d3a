"""Errors and warnings: classes, what they say in parts, and how the message is made of them."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, TypeVar, cast

from typing_extensions import ParamSpec

from calipers.errors.text import Spelling, Text, in_one_line, joined, listing

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

P = ParamSpec("P")
T = TypeVar("T")

_ENDS = (".", "?", "!", "…")


class Fields(TypedDict, total=False):
    """What can be said besides ``what``; see :class:`Context`."""

    subject: str
    where: str
    got: str
    meant: str | None
    allowed: str | Collection[str]
    hint: str


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

    what: str
    subject: str = ""
    where: str = ""
    got: str = ""
    meant: str | None = None
    allowed: str | Collection[str] = ""
    hint: str = ""

    @property
    def text(self) -> Text:
        """The message: place, subject and what is wrong with it; what was meant; the way out."""
        first = joined(" ", [self.subject, self.what])
        whole = Text()
        for sentence in (
            joined(", got ", [first, self.got]),
            f"Did you mean '{self.meant}'?" if self.meant else "",
            "Allowed: " + _listed(self.allowed) if self.allowed else "",
            self.hint,
        ):
            # after a list of several lines a new one begins
            whole = joined("\n" if "\n" in whole else " ", [whole, _ended(sentence)])
        return joined(": ", [self.where, whole])

    def as_dict(self, spelling: Spelling = str) -> dict[str, str]:
        """Return what is said as plain data, without what is not."""
        return {name: _listed(value).spelt(spelling) for name, value in vars(self).items() if value}


def _listed(words: str | Collection[str]) -> Text:
    return Text(words if isinstance(words, str) else listing(words))


def _ended(text: str) -> str:
    """Return a sentence with its full stop; a list of several lines has none."""
    return text + "." if text and "\n" not in text and not text.endswith(_ENDS) else text


class _WithContext:
    """An error or a warning with its context; takes what :class:`Context` takes."""

    context: Context
    args: tuple[Any, ...]

    def __init__(self, what: str, **fields: Unpack[Fields]) -> None:
        self.context = Context(what, **fields)
        super().__init__(str(self.context.text))  # type: ignore[call-arg]

    def __str__(self) -> str:
        return str(self.context.text)

    def __reduce__(self) -> tuple[Any, ...]:
        # not by the constructor, which takes something else in every class
        return copyreg.__newobj__, (type(self),), {**vars(self), "args": self.args}  # type: ignore[attr-defined]

    def spelt(self, spelling: Spelling) -> str:
        """Return the message, in which ``spelling`` says how options are spelt."""
        return self.context.text.spelt(spelling)

    def add_place(self, where: str) -> None:
        """Say where it was found, before all else that is said."""
        self._change(where=joined(": ", [where, self.context.where]))

    def add_hint(self, hint: str) -> None:
        """Add what to do next, or what else is known."""
        self._change(hint=joined(" ", [_ended(self.context.hint), hint]))

    def _change(self, **fields: Unpack[Fields]) -> None:
        self.context = replace(self.context, **fields)
        self.args = (str(self),)


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


class UnseenModulesError(CalipersError, ValueError):
    """Modules whose parameters need data that never reached them: ``names``."""

    exit_code = 4

    def __init__(self, what: str, *, names: Iterable[str] = (), **fields: Unpack[Fields]) -> None:
        self.names = tuple(names)
        super().__init__(what, **fields)


class FusedExpertsError(ModelRunError, NotImplementedError):
    """Experts in stacked parameters that cannot be told apart faithfully."""


class RankError(CalipersError, RuntimeError):
    """Processes of a job that cannot go on together."""

    exit_code = 6


class LayoutError(ConfigurationError):
    """A strategy and a tensor that do not fit each other."""


class UnsuitableError(ConfigurationError):
    """An observer that is not made for this kind of tensor, strategy or format."""


class UnknownObserverError(CalipersError, KeyError):
    """A name under which no observer is registered."""

    exit_code = 2


class TensorKindError(CalipersError, TypeError):
    """A tensor of a kind that cannot be observed."""

    exit_code = 2


class NoStatisticsError(CalipersError, AssertionError):
    """A result was asked for that needs something to be observed first, or again."""

    exit_code = 4


class MergeError(CalipersError, ValueError):
    """Statistics that cannot become one, or not those that were saved."""

    exit_code = 5


class ImportanceError(CalipersError, ValueError):
    """Importance that cannot be used."""

    exit_code = 3


class ImportanceUnsupportedError(ImportanceError, NotImplementedError):
    """Importance for a kind of tensor or strategy that has none."""


class RecipeError(ConfigurationError):
    """A recipe that cannot be read, or that does not make sense.

    :param path: the keys that lead to it, as far as they are known
    :param source: the file, or another word for where the recipe comes from
    :param line: the line in it
    """

    def __init__(
        self,
        what: str,
        *,
        path: Iterable[str | int] = (),
        source: str | None = None,
        line: int | None = None,
        **fields: Unpack[Fields],
    ) -> None:
        self.path = tuple(path)
        super().__init__(what, **fields)
        self.add_line(source, line)

    @classmethod
    def of(cls, error: CalipersError, where: str = "", path: Iterable[str | int] = ()) -> Self:
        """Return what another error says, as one of a recipe.

        >>> str(RecipeError.of(CalipersError("must be a number", got="'x'"), "seed"))
        "seed: must be a number, got 'x'."
        """
        made = cls(**vars(error.context), path=path)
        made.add_place(where)
        return made

    def add_line(self, source: str | None, line: int | None) -> None:
        """Say where in a file it is, as far as that is known."""
        self.add_place(joined(", ", [source or "", f"line {line}" if line else ""]))


class CodeNotAllowedError(RecipeError):
    """An observer in a file of Python code, which nobody has allowed to run."""


# Several mistakes, and what libraries raise


class SeveralMistakesError(ConfigurationError):
    """What several checks raised: ``mistakes``."""

    def __init__(self, mistakes: list[CalipersError]) -> None:
        self.mistakes = mistakes
        head = f"There are {len(mistakes)} mistakes:"
        super().__init__(joined("\n  ", [head, *(each.context.text for each in mistakes)]))


class Mistakes:
    """Gathers the errors of checks.

    >>> from calipers.errors import check_whole_number
    >>> mistakes = Mistakes()
    >>> for size in (0, 128, "x"):
    ...     mistakes.check(check_whole_number, "group_size", size, least=1)
    >>> mistakes.tell()
    Traceback (most recent call last):
    calipers.errors.base.SeveralMistakesError: There are 2 mistakes:
      group_size=0 is not allowed. Allowed: a whole number, 1 or more.
      group_size='x' is not allowed. Allowed: a whole number, 1 or more.
    """

    def __init__(self) -> None:
        self._found: list[CalipersError] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def check(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Return what a function returns; None if it fails, which is told of later."""
        try:
            return function(*args, **options)
        except CalipersError as error:
            self.add(error)
        return cast(T, None)  # nobody uses it: all that is needed comes after tell()

    def add(self, error: CalipersError) -> None:
        """Add what is told of later."""
        self._found += error.mistakes if isinstance(error, SeveralMistakesError) else [error]

    def tell(self) -> None:
        """Raise what was found: a single error as it is, several as one."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise SeveralMistakesError(self._found)


@contextmanager
def library_errors(told_as: Callable[[str], CalipersError]) -> Iterator[None]:
    """Turn whatever a library raises into the error made of its words.

    Libraries promise no set of exceptions for damaged input: validation errors of their own come,
    and KeyError, RecursionError or MemoryError. A panic in Rust is not even an Exception.

    >>> with library_errors(lambda words: CalipersError(f"The file is damaged: {words}.")):
    ...     {}["key"]
    Traceback (most recent call last):
    calipers.errors.base.CalipersError: The file is damaged: KeyError: 'key'.
    """
    try:
        yield
    except CalipersError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        words = f"{type(error).__name__}: {in_one_line(str(error))}".rstrip(".: ")
        raise told_as(words) from error
