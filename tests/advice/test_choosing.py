"""The best choice within a limit, held against every choice that there is."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calipers.advice.choosing import Options, UnreachableError, choose, front


@st.composite
def options(draw: st.DrawFn) -> Options:
    groups, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    number = st.integers(1, 40)
    sizes = [[draw(number) for _ in range(count)] for _ in range(groups)]
    return Options(sizes, [[draw(number) / 8 for _ in range(count)] for _ in range(groups)])


def every(given_: Options) -> list[tuple[float, float]]:
    """Size and harm of every choice."""
    columns = range(len(given_.sizes[0]))
    return [
        tuple(sum(row[c] for row, c in zip(part, choice, strict=True)) for part in given_)  # type: ignore[misc]
        for choice in product(columns, repeat=len(given_.sizes))
    ]


@given(options(), st.integers(1, 160))
def test_no_choice_is_better(given_: Options, limit: int) -> None:
    for key, mine, other in (("size", 0, 1), ("harm", 1, 0)):
        within = [each for each in every(given_) if each[mine] <= limit]
        if not within:
            with pytest.raises(UnreachableError) as raised:
                choose(given_, **{key: limit})
            assert raised.value.least == pytest.approx(min(each[mine] for each in every(given_)))
            continue
        found = choose(given_, **{key: limit})
        assert (found.size, found.harm)[mine] <= limit
        assert (found.size, found.harm)[other] == pytest.approx(min(each[other] for each in within))
        assert found.gap == 0


@given(options())
def test_nothing_beats_the_front(given_: Options) -> None:
    points = front(given_)
    choices = every(given_)
    for point in points:
        assert not [c for c in choices if c[0] <= point.size and c[1] < point.harm - 1e-9]
        assert not [c for c in choices if c[0] < point.size and c[1] <= point.harm + 1e-12]
    assert points[0].size == min(size for size, _ in choices)
    assert points[-1].harm == pytest.approx(min(harm for _, harm in choices))
    assert [point.size for point in points] == sorted({point.size for point in points})
