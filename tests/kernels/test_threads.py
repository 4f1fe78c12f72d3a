"""Results do not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DTYPES
from torch import Tensor

from calipers.kernels.counts import count_values
from calipers.kernels.extrema import extrema
from calipers.kernels.moments import sum_of_squares
from calipers.kernels.quantize import quantize_with_error
from calipers.kernels.search import search_range

FACTORS = [1 - i / 50 for i in range(20)]
INT8 = QuantizationArgs(num_bits=8, symmetric=False)
# many short pieces, a few long ones, one that is cut into chunks, interleaved ones
SHAPES = [(1, 300, 40, 1, 41), (1, 60, 1, 1, 5000), (1, 1, 1, 400, 1100), (900, 1, 11, 1, 64)]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def identical(run: Callable[[], tuple[Tensor, ...]]) -> None:
    results = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        results.append(run())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestNumberOfThreads:
    def test_extrema(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        values = torch.randn(shape).to(dtype)
        values[0, 0, 0, 0, 0] = float("nan")
        identical(lambda: tuple(torch.as_tensor(field) for field in extrema(values)))

    def test_counts(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        values = torch.randn(shape).to(dtype)[:, :1, :1]
        identical(lambda: (count_values(values),))

    def test_search(self, shape: tuple[int, ...], dtype: torch.dtype, engine: str) -> None:
        if engine == "torch":
            pytest.skip("torch sums in an order that depends on it")
        values = torch.randn(shape).to(dtype)
        low, high, *_ = extrema(values)
        identical(lambda: search_range(values, low, high, INT8, factors=FACTORS, norm=2.4))

    def test_quantize(self, shape: tuple[int, ...], dtype: torch.dtype, engine: str) -> None:
        if engine == "torch":
            pytest.skip("torch sums in an order that depends on it")
        values = torch.randn(shape).to(dtype)
        scale = torch.rand(shape[1:3]) + 0.01
        args = QuantizationArgs(num_bits=4)
        identical(lambda: quantize_with_error(values, scale, None, args, 2.4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3000, 50), (70, 5000)])
def test_sum_of_squares(shape: tuple[int, int], dtype: torch.dtype, engine: str) -> None:
    if engine == "torch":
        pytest.skip("torch sums in an order that depends on it")
    tokens = torch.randn(shape).to(dtype)
    identical(lambda: (sum_of_squares(tokens),))
