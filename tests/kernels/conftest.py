"""Every test of a kernel runs once per version of it: in torch, and for each instruction set.

A test that names the engine among the parameters of a pairwise selection chooses itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines import each_engine, engine_in_use


@pytest.fixture(params=each_engine(), autouse=True)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with engine_in_use(request.param):
        yield request.param
