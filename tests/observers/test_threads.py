"""Threads that share an observer lose nothing, read nothing torn, and do not wait forever."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import nvfp4

from calipers.errors import NoStatisticsError
from calipers.observers import Observer
from calipers.statistics.sums import BlockHessians, SquareSums

THREADS, BATCHES, TOKENS, WIDTH = 8, 100, 4, 32
INT8 = QuantizationArgs(num_bits=8)
W4 = QuantizationArgs(num_bits=4, group_size=16)


@pytest.fixture(autouse=True)
def _threads_take_turns_all_the_time() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], None]) -> None:
    """Run jobs at the same time; one that fails or never ends fails the test."""
    failed: list[BaseException] = []
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        start.wait()
        try:
            job()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed, failed
    assert not any(thread.is_alive() for thread in threads), "deadlock"


def show(take: Callable[[torch.Tensor], Any]) -> Callable[[], None]:
    def job() -> None:
        for _ in range(BATCHES):
            take(torch.ones(TOKENS, WIDTH))

    return job


def build(name: str, base_name: str = "input", args: QuantizationArgs = INT8) -> Observer:
    return Observer.load_from_registry(name, base_name=base_name, args=args)


@pytest.mark.parametrize("name", ["histogram_mse", "static_minmax", "mse"])
def test_every_token_is_counted(name: str) -> None:
    observer = build(name)
    together(*[show(observer)] * THREADS)
    assert observer.num_observed_tokens == THREADS * BATCHES * TOKENS
    if name == "histogram_mse":
        assert int(observer.counts_bfloat16.sum()) == THREADS * BATCHES * TOKENS * WIDTH


@pytest.mark.parametrize("kind", [BlockHessians, SquareSums])
def test_every_token_is_in_the_sums(kind: Any) -> None:
    sums = kind(width=16) if kind is BlockHessians else kind()
    together(*[show(sums.update)] * THREADS)
    total, count = sums.fields().values()
    assert int(count) == THREADS * BATCHES * TOKENS
    assert bool((total == int(count)).all())


@pytest.mark.parametrize("name", ["imatrix_mse", "optimal"])
def test_every_token_is_in_what_a_hook_gathers(name: str) -> None:
    linear = torch.nn.Linear(WIDTH, 4)
    observer = build(name, "weight", W4)
    observer.attach(linear)
    together(*[show(linear)] * THREADS)
    observer.detach(linear)
    assert int(linear._imatrix_count) == THREADS * BATCHES * TOKENS
    assert bool((linear._imatrix_sum == int(linear._imatrix_count)).all())


def test_what_is_read_meanwhile_is_of_one_moment() -> None:
    observer, done = build("histogram_mse"), threading.Event()

    def read() -> None:
        other = build("histogram_mse")
        while not done.is_set():
            fields = observer.copied_fields()
            if fields:
                assert int(fields["counts_bfloat16"].sum()) == WIDTH * int(
                    fields["observed_tokens"]
                )
            state = observer.state_dict()
            other.load_state_dict(state)
            if other.has_statistics:
                assert int(other.counts_bfloat16.sum()) == WIDTH * other.num_observed_tokens
                with contextlib.suppress(NoStatisticsError):  # it may be reset by now
                    observer.get_qparams()

    def write() -> None:
        show(observer)()
        observer.reset()
        show(observer)()
        done.set()

    together(read, write)
    assert observer.num_observed_tokens == BATCHES * TOKENS


def test_observers_that_merge_into_each_other_do_not_wait_for_each_other() -> None:
    pair = [build("static_minmax")(torch.ones(1, WIDTH)) for _ in range(2)]

    def merge(mine: Observer, other: Observer) -> Callable[[], None]:
        def job() -> None:
            for _ in range(10):
                mine.merge(other)

        return job

    together(merge(*pair), merge(*pair[::-1]), merge(pair[0], pair[0]))
    # Whoever begins adds one token ten times, if nothing is lost.
    assert all(observer.num_observed_tokens >= 11 for observer in pair)


@pytest.mark.parametrize("name", ["memoryless_minmax", "optimal"])
@pytest.mark.filterwarnings("ignore:.*Falls back to plain error")
def test_fused_observers_do_not_wait_for_each_other(name: str) -> None:
    fused = [build(name, "weight", nvfp4(16)) for _ in range(3)]
    Observer.fuse(fused)
    for observer in fused:
        observer(torch.ones(2, WIDTH))

    def ask(observer: Observer) -> Callable[[], None]:
        def job() -> None:
            for _ in range(20):
                observer(torch.ones(2, WIDTH))
                observer.get_qparams()

        return job

    together(*map(ask, fused))


def test_a_copy_has_a_lock_of_its_own() -> None:
    model = torch.nn.Linear(WIDTH, 4)
    model.input_observer = build("histogram_mse")(torch.ones(TOKENS, WIDTH))
    copies = [copy.deepcopy(model).input_observer, pickle.loads(pickle.dumps(model.input_observer))]
    with model.input_observer.lock:
        together(*(show(each) for each in copies))
    assert all(each.num_observed_tokens == TOKENS * (1 + BATCHES) for each in copies)
    fused = [build("minmax", "weight", nvfp4(16)) for _ in range(2)]
    Observer.fuse(fused)
    first, second = copy.deepcopy(fused)
    assert first.lock is second.lock is not fused[0].lock
