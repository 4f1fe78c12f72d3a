"""Memory that was freed, and that the process still has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


class Freed:
    """Gives freed memory back to the operating system, where the C library keeps it.

    Tensors of one layer after another leave holes between small things that stay; without this a
    process that holds one layer at a time grows by a part of each.

    >>> freed = Freed()
    >>> freed.count(12_582_912)
    """

    def __init__(self, most: int = 1 << 27) -> None:
        self._most, self._size = most, 0

    def count(self, size: int) -> None:
        """Note that work on so many bytes is over; now and then what it left is given back."""
        self._size += size
        if self._size > self._most:
            self._size = 0
            _trim()(0)


@cache
def _trim() -> Callable[[int], int]:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # not glibc
        return lambda _: 0
    return found
