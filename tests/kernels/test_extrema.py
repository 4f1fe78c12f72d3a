from __future__ import annotations

import pytest
import torch
from data import DISTRIBUTIONS, DTYPES

from calipers.kernels.extrema import extrema

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 2, 5), (1, 4, 7, 3), (6, 9)])
def test_against_loops(shape: tuple[int, ...], name: str, dtype: torch.dtype) -> None:
    view = DISTRIBUTIONS[name](shape).to(dtype)
    found = extrema(view.unsqueeze(-2))
    flat = view.movedim(0, -2).reshape(*shape[1:-1], -1)
    assert torch.equal(found.min_vals, flat.min(-1).values)
    assert torch.equal(found.max_vals, flat.max(-1).values)
    assert found.nonfinite == 0


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    view = torch.tensor(
        [[[1.0, NAN], [INF, -INF], [2.0, -INF]], [[5.0, 3.0], [NAN, NAN], [9.0, 4.0]]]
    )
    found = extrema(view.unsqueeze(-2))
    assert found.min_vals.tolist() == [1.0, 0.0, 2.0]
    assert found.max_vals.tolist() == [5.0, 0.0, 9.0]
    assert found.nonfinite == 6
