"""The rows of the native kernels are those of the formats."""

from __future__ import annotations

import numpy as np
import pytest
from engines import NATIVE_ENGINES, native_only

from calipers.numerics.formats import GRIDS

pytestmark = [native_only, pytest.mark.parametrize("engine", NATIVE_ENGINES[:1], indirect=True)]


def optimum(grid: str, *, shifted: bool) -> None:
    """Look for the best of one scale, for one value."""
    from calipers.kernels import _native

    one = np.ones(1, np.float32)
    search = _native.ScaleSearch(
        values=one.reshape(1, 1, 1, 1, 1),
        weights=None,
        low=one,
        high=one,
        windows=np.array([[0, -1, 1, 1, 1]], np.float32),
        best=np.zeros((1, 1), np.float32),
        window=np.zeros((1, 1), np.int32),
        errors=np.zeros((1, 1)),
    )
    table = {"storable": one, "halvable": 1.0, "most": 9.0}
    _native.optimum(search, grid=grid, shifted=shifted, norm=2.0, threads=1, **table)


def test_every_format_has_a_row() -> None:
    from calipers.kernels import _native

    assert {row.native_name for row in GRIDS.values()} <= {*_native.grids()}


def test_a_grid_without_a_row_is_refused() -> None:
    optimum("e2m1", shifted=False)
    with pytest.raises(ValueError, match="There is no grid fp4"):
        optimum("fp4", shifted=False)


def test_zero_points_that_a_grid_does_not_have_are_refused() -> None:
    optimum("e4m3", shifted=True)
    with pytest.raises(ValueError, match="The grid e2m1 has no zero points"):
        optimum("e2m1", shifted=True)
    with pytest.raises(ValueError, match="The zero points of integers move their windows"):
        optimum("int", shifted=True)
