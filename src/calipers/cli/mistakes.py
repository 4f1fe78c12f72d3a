"""What is wrong with a command, gathered, so that all of it is said at once."""

from __future__ import annotations

from types import TracebackType

from calipers.errors import CalipersError, ConfigurationError, joined


class SeveralMistakesError(ConfigurationError):
    """What several checks of a command found.

    :param mistakes: what each of them raised
    """

    def __init__(self, mistakes: list[CalipersError]) -> None:
        self.mistakes = mistakes
        head = f"The command has {len(mistakes)} mistakes:"
        super().__init__(joined("\n  ", [head, *(each.context.text for each in mistakes)]))


class Mistakes:
    """Gathers the errors of checks, each of which stands in a ``with``.

    >>> mistakes = Mistakes()
    >>> for size in (0, 128, -1):
    ...     with mistakes:
    ...         if size < 1:
    ...             raise ConfigurationError(f"There is no group of {size} weights")
    >>> mistakes.tell()
    Traceback (most recent call last):
    calipers.cli.mistakes.SeveralMistakesError: The command has 2 mistakes:
      There is no group of 0 weights.
      There is no group of -1 weights.
    """

    def __init__(self) -> None:
        self._found: list[CalipersError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, SeveralMistakesError):
            self._found.extend(error.mistakes)
        elif isinstance(error, CalipersError):
            self._found.append(error)
        return isinstance(error, CalipersError)

    def tell(self) -> None:
        """Raise what was found: a single error as it is, several as one."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise SeveralMistakesError(self._found)
