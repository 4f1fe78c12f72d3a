"""What is wrong with a call or a command, gathered, so that all of it is said at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from typing_extensions import ParamSpec

from calipers.errors.base import CalipersError, ConfigurationError
from calipers.errors.text import joined

P = ParamSpec("P")
T = TypeVar("T")


class SeveralMistakesError(ConfigurationError):
    """What several checks found.

    :param mistakes: what each of them raised
    """

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
    calipers.errors.mistakes.SeveralMistakesError: There are 2 mistakes:
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
        except SeveralMistakesError as error:
            self._found.extend(error.mistakes)
        except CalipersError as error:
            self._found.append(error)
        return cast(T, None)  # nobody uses it: all that is needed comes after tell()

    def tell(self) -> None:
        """Raise what was found: a single error as it is, several as one."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise SeveralMistakesError(self._found)
