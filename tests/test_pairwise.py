from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import pairwise


@pytest.mark.parametrize("sizes", [(3, 4), (2, 2, 2), (14, 7, 3, 4), (12, 12, 3, 6, 4), (5, 1, 2)])
def test_any_two_values_meet_in_few_rows(sizes: tuple[int, ...]) -> None:
    rows = pairwise(*(range(size) for size in sizes))
    for one, other in combinations(range(len(sizes)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(range(sizes[one]), range(sizes[other])))
    largest, second = sorted(sizes)[-2:][::-1]
    assert len(rows) <= 1.5 * largest * second
    assert len(set(rows)) == len(rows)


def test_the_rows_are_always_the_same() -> None:
    assert pairwise("abc", "de", "fg") == pairwise("abc", "de", "fg")
