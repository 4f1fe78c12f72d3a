from __future__ import annotations

import pytest
import torch
from data import DTYPES
from engines import threads_in_use, with_engines

from calipers.kernels.reductions import sum_of_products


def allowed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What float32 sums of some hundred tokens may be off by."""
    norms = (each.double().square().sum(0).sqrt() for each in (x, y))
    return 1e-6 * torch.outer(*norms)


# One token, odd numbers of tokens, columns around panels and strips, more tokens than are packed.
@with_engines(
    "shape, dtype",
    [(1, 1, 1), (2, 3, 50), (7, 48, 49), (257, 200, 96), (1025, 97, 31), (2500, 5, 193)],
    [*DTYPES, torch.float64],
)
def test_against_float64(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, left, right = shape
    x, y = ((torch.randn(tokens, n) * torch.linspace(0.01, 5, n)).to(dtype) for n in (left, right))
    found, own = sum_of_products(x, y), sum_of_products(x)
    assert found.dtype == own.dtype == torch.float64
    assert ((found - x.double().T @ y.double()).abs() <= allowed(x, y)).all()
    assert ((own - x.double().T @ x.double()).abs() <= allowed(x, x)).all()
    assert torch.equal(own, own.T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_misaligned_memory(dtype: torch.dtype) -> None:
    wide = torch.randn(130, 301).to(dtype)
    for x in (wide[:, ::3], wide[:, 1:], wide.t(), wide[::2, 5:50], wide[:1].expand(9, -1)):
        assert torch.equal(sum_of_products(x), sum_of_products(x.clone()))
        y = wide[: len(x), :60] if len(x) <= 130 else wide.t()[: len(x), :60]
        assert torch.equal(sum_of_products(x, y), sum_of_products(x.clone(), y.clone()))


def test_nothing_to_add_up() -> None:
    assert sum_of_products(torch.ones(0, 3)).tolist() == [[0.0] * 3] * 3
    assert sum_of_products(torch.ones(4, 3), torch.ones(4, 0)).shape == (3, 0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_seen_on_the_diagonal(value: float) -> None:
    x = torch.randn(300, 60).bfloat16()
    x[299, 59] = value
    found = sum_of_products(x)
    assert not found[59, 59].isfinite()
    assert found[:59, :59].isfinite().all()


def test_the_number_of_threads_changes_nothing() -> None:
    x, y = torch.randn(1500, 200).bfloat16(), torch.randn(1500, 300).bfloat16()
    results = []
    for threads in (1, 2, 5):
        with threads_in_use(threads):
            results.append((sum_of_products(x), sum_of_products(x, y)))
    for own, cross in results[1:]:
        assert torch.equal(own, results[0][0])
        assert torch.equal(cross, results[0][1])
