"""What libraries raise while they read a user's files, as errors of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from calipers.errors.base import CalipersError
from calipers.errors.formatting import in_one_line


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
        raise told_as(words_of(error)) from error


def words_of(error: BaseException) -> str:
    """Return the name and the message of an exception on one line."""
    return f"{type(error).__name__}: {in_one_line(str(error))}".rstrip(".: ")
