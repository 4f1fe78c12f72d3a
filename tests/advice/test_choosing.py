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


def test_a_limit_holds_however_little_is_beyond_it() -> None:
    """One byte more would lose nothing at all."""
    given_ = Options([[50, 51], [50, 50]], [[1.0, 0.0], [1.0, 1.0]])
    assert choose(given_, size=101).columns[0] == 1
    assert choose(given_, size=100).columns[0] == 0
    other_way_round = Options(given_.harms, given_.sizes)
    assert choose(other_way_round, harm=101).columns[0] == 1
    assert choose(other_way_round, harm=100).columns[0] == 0


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
