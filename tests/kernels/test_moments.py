from __future__ import annotations

import pytest
import torch
from data import DTYPES

from calipers.kernels.moments import sum_of_squares


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (7, 3), (1000, 5)])
def test_against_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tokens = (torch.randn(shape) * 3).to(dtype)
    exact = tokens.double().square().sum(0)
    found = sum_of_squares(tokens)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)


def test_many_tokens_do_not_drown_small_ones() -> None:
    """A float32 sum would stay at 2^24."""
    tokens = torch.ones(1 << 12, 1)
    total = torch.tensor([float(1 << 30)], dtype=torch.float64)
    for _ in range(4):
        total += sum_of_squares(tokens)
    assert total.item() == (1 << 30) + 4 * (1 << 12)
    half = torch.full((70_000, 1), 1.0, dtype=torch.float16)
    assert sum_of_squares(half).item() == 70_000
