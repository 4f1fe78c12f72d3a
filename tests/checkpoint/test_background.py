"""Work in a thread of its own: in order, not too far ahead, and not longer than it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from calipers.checkpoint.writer import in_background


def test_it_is_at_most_so_many_ahead() -> None:
    begun: list[int] = []

    def work() -> Generator[int, None, None]:
        for number in range(100):
            begun.append(number)
            yield number

    for number in in_background(work(), ahead=2):
        # Two are ready, one waits for room, and one is just being taken.
        assert begun[-1] <= number + 4
    assert begun == list(range(100))


def test_what_is_raised_comes_behind_what_was_made() -> None:
    def work() -> Generator[int, None, None]:
        yield 1
        raise KeyError("gone")

    found = in_background(work())
    assert next(found) == 1
    with pytest.raises(KeyError, match="gone"):
        next(found)


def test_whoever_stops_asking_ends_it() -> None:
    before = threading.active_count()
    found = in_background(number for number in range(10**9))
    assert next(found) == 0
    found.close()
    assert threading.active_count() == before
