"""Memory that was freed, and that the process still has."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def release_freed_memory() -> None:
    """Give freed memory back to the operating system, where the C library keeps it.

    Tensors of one layer after another leave holes between small things that stay; without this a
    process that holds one layer at a time grows by a part of each.
    """
    _trim()(0)


@cache
def _trim() -> Callable[[int], int]:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # not glibc
        return lambda _: 0
    return found
