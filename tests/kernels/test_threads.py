"""Results do not depend on the number of threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DTYPES
from engines import NATIVE_ENGINES, threads_in_use, with_engines
from torch import Tensor

from calipers.kernels.reductions import (
    BINS,
    count_values,
    extrema,
    sum_of_squares,
    summarize_channels,
)
from calipers.kernels.resources import in_threads, kernels_only, num_threads
from calipers.kernels.rounding import Quantization, quantization_errors
from calipers.kernels.search import RangeSearch, search_range

FACTORS = [1 - i / 50 for i in range(20)]
INT8 = QuantizationArgs(num_bits=8, symmetric=False)
# many short pieces, a few long ones, one that is cut into chunks, interleaved ones
SHAPES = [(1, 300, 40, 1, 41), (1, 60, 1, 1, 5000), (1, 1, 1, 400, 1100), (900, 1, 11, 1, 64)]


def identical(run: Callable[[], tuple[Tensor, ...]]) -> None:
    results = []
    for threads in (1, 2, 7):
        with threads_in_use(threads):
            results.append(run())
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@with_engines("shape, dtype", SHAPES, DTYPES)
def test_extrema(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    values[0, 0, 0, 0, 0] = float("nan")
    identical(lambda: tuple(torch.as_tensor(field) for field in extrema(values)))


@with_engines("shape, dtype", SHAPES, DTYPES)
def test_counts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)[:, :1, :1]
    identical(lambda: (count_values(values),))


# What torch sums up depends on the number of its threads.


@with_engines("shape, dtype", SHAPES, DTYPES, engines=NATIVE_ENGINES)
def test_search(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    low, high, *_ = extrema(values)
    identical(lambda: search_range(RangeSearch(values, low, high, INT8, factors=FACTORS, norm=2.4)))


@with_engines("shape, dtype", SHAPES, DTYPES, engines=NATIVE_ENGINES)
def test_quantize(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape).to(dtype)
    scale = torch.rand(shape[1:3]) + 0.01
    args = QuantizationArgs(num_bits=4)
    identical(lambda: (quantization_errors(Quantization(values, scale, None, args, 2.4)),))


@with_engines("shape, dtype", [(3000, 50), (70, 5000)], DTYPES, engines=NATIVE_ENGINES)
def test_sum_of_squares(shape: tuple[int, int], dtype: torch.dtype) -> None:
    tokens = torch.randn(shape).to(dtype)
    identical(lambda: (sum_of_squares(tokens),))


@with_engines("shape, dtype", [(5000, 900), (70, 50000)], DTYPES, engines=NATIVE_ENGINES)
def test_summaries_of_channels(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """So many values that each thread has a table of its own."""
    tokens = torch.randn(shape).to(dtype)

    def run() -> tuple[Tensor, ...]:
        counts = torch.zeros(1, BINS, dtype=torch.int64)
        found = summarize_channels(tokens, counts=counts)
        assert found is not None
        return (*found, counts)

    identical(run)


def test_kernels_alone_may_have_several() -> None:
    seen = []
    with threads_in_use(3):
        with contextlib.suppress(KeyError), kernels_only():
            seen.append((num_threads(), torch.get_num_threads()))
            elsewhere = threading.Thread(target=lambda: seen.append((num_threads(), 0)))
            elsewhere.start()
            elsewhere.join()
            raise KeyError
        seen.append((num_threads(), torch.get_num_threads()))
    assert seen[0] == (3, 1)
    assert seen[1] == (1, 0)  # what is told to one thread concerns no other
    assert seen[2] == (3, 3)


def test_processes_of_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("calipers.kernels.resources._processors", lambda: 8)
    threads = {}
    with threads_in_use(6):
        for processes in ("", "1", "2", "3", "100", "many"):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
            threads[processes] = num_threads()
    assert threads == {"": 6, "1": 6, "2": 4, "3": 2, "100": 1, "many": 6}


def test_small_work_runs_beside_other_work_in_one_thread_each() -> None:
    both = threading.Barrier(2, timeout=30)

    def work(number: int) -> tuple[int, int, bool]:
        both.wait()  # nobody would come if they ran one after the other
        return number, num_threads(), torch.is_grad_enabled()

    with threads_in_use(2):
        with in_threads(work, range(6)) as results:
            assert list(results) == [(number, 1, False) for number in range(6)]
            assert (num_threads(), torch.get_num_threads()) == (2, 1)
        assert (num_threads(), torch.get_num_threads()) == (2, 2)


def test_what_fails_in_a_thread_fails_here() -> None:
    def work(number: int) -> int:
        return 1 // number

    with (
        threads_in_use(2),
        pytest.raises(ZeroDivisionError),
        in_threads(work, [2, 1, 0, 3]) as results,
    ):
        list(results)
    assert num_threads() == torch.get_num_threads()


def test_calls_at_the_same_time_are_all_right() -> None:
    values = [torch.randn(1, 1, 1, 1 << 20) for _ in range(4)]

    def look(number: int) -> bool:
        chosen = values[number % len(values)]
        low, high, *_ = extrema(chosen)
        return (float(low), float(high)) == tuple(map(float, chosen.aminmax()))

    with threads_in_use(3), ThreadPoolExecutor(5) as pool:
        assert all(pool.map(look, range(400)))
