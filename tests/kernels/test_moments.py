from __future__ import annotations

import pytest
import torch
from data import DTYPES
from engines import with_engines

from calipers.kernels.reductions import sum_of_squares


@with_engines(
    "shape, masked, dtype",
    [(1, 1), (7, 3), (1000, 5), (515, 41), (259, 2500)],
    [False, True],
    [*DTYPES, torch.float64],
)
def test_against_float64(shape: tuple[int, int], masked: bool, dtype: torch.dtype) -> None:
    tokens = (torch.randn(shape) * 3).to(dtype)
    mask = torch.rand(shape[0]) < 0.4 if masked else None
    counted = tokens if mask is None else tokens[mask]
    found = sum_of_squares(tokens, mask)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, counted.double().square().sum(0), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_misaligned_memory(dtype: torch.dtype) -> None:
    wide = torch.randn(130, 301).to(dtype)
    for tokens in (wide[:, ::3], wide[:, 1:], wide.t(), wide[::2, 5:50]):
        found = sum_of_squares(tokens)
        torch.testing.assert_close(found, tokens.double().square().sum(0), rtol=1e-13, atol=0)


def test_a_mask_of_numbers_and_an_empty_one() -> None:
    tokens = torch.randn(6, 3)
    mask = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    assert torch.equal(sum_of_squares(tokens, mask), sum_of_squares(tokens[[0, 3, 4]]))
    assert sum_of_squares(tokens, torch.zeros(6)).tolist() == [0.0] * 3
    assert sum_of_squares(tokens[:0]).tolist() == [0.0] * 3


def test_many_tokens_do_not_drown_small_ones() -> None:
    """A float32 sum would stay at 2^24."""
    tokens = torch.ones(1 << 12, 1)
    total = torch.tensor([float(1 << 30)], dtype=torch.float64)
    for _ in range(4):
        total += sum_of_squares(tokens)
    assert total.item() == (1 << 30) + 4 * (1 << 12)
    half = torch.full((70_000, 1), 1.0, dtype=torch.float16)
    assert sum_of_squares(half).item() == 70_000


def test_squares_beyond_float32() -> None:
    assert sum_of_squares(torch.tensor([[1e30, 1e-30]])).tolist() == pytest.approx([1e60, 1e-60])
