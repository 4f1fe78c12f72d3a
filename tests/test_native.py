"""The native kernels in real processes: chosen, missing, interrupted, large."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from engines import NATIVE_ENGINES, native_only
from torch._subclasses.fake_tensor import FakeTensorMode

from calipers.errors import ConfigurationError
from calipers.kernels import KernelReport, describe, native
from calipers.kernels.operations import Workload, chosen_backends
from calipers.kernels.reductions import count_values, extrema
from calipers.kernels.search import RangeSearch, search_range

FIRST_USE = (
    "import torch; from calipers.kernels import describe; "
    "from calipers.kernels.reductions import extrema; "
    "print(extrema(torch.ones(1, 2, 1, 3)).max_vals.tolist()); print(describe())"
)


def python(script: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != native.SWITCH}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)


@contextmanager
def switched(switch: str) -> Iterator[Callable[[], KernelReport]]:
    """Let kernels be chosen again, as at their first use in a process with this switch."""
    before = describe().instruction_set
    _forget()
    try:
        with mock.patch.dict(os.environ, {native.SWITCH: switch}):
            yield describe
    finally:
        _forget()
        if before is not None:
            native.library().use(before)


def _forget() -> None:
    for known in (chosen_backends, native.library, native._status):
        known.cache_clear()


class TestChoice:
    def test_describe(self) -> None:
        report = describe()
        assert report.operations["extrema"] == ("native", "torch")[not NATIVE_ENGINES :]
        assert report.threads == torch.get_num_threads()
        assert all(name in str(report) for name in report.operations)
        assert all(each.reason in str(report) for each in report.backends)

    @native_only
    def test_the_best_instruction_set_is_taken(self) -> None:
        with switched("") as report:
            assert f"set: {NATIVE_ENGINES[-1]} (the best this machine has)" in str(report())

    @pytest.mark.parametrize("name", NATIVE_ENGINES)
    def test_an_instruction_set_can_be_asked_for(self, name: str) -> None:
        with switched(name) as report:
            assert f"set: {name} (CALIPERS_NATIVE={name} is set)" in str(report())
            assert extrema(torch.ones(1, 2, 1, 3)).max_vals.tolist() == [1.0, 1.0]

    def test_none_can_be_asked_for(self) -> None:
        with switched("0") as report:
            assert extrema(torch.ones(1, 2, 1, 3)).max_vals.tolist() == [1.0, 1.0]
            assert "native: not used, CALIPERS_NATIVE=0 is set" in str(report())
            assert set(report().operations.values()) == {("torch",)}

    @native_only
    def test_an_unknown_one_is_refused(self) -> None:
        with (
            switched("avx9") as report,
            pytest.raises(ConfigurationError, match="CALIPERS_NATIVE=avx9: this machine has") as it,
        ):
            report()
        assert "or 0 for none" in str(it.value)

    @pytest.mark.slow
    def test_without_the_extension_everything_works_after_one_warning(self) -> None:
        hidden = "import sys; sys.modules['calipers.kernels._native'] = None; "
        result = python(hidden + FIRST_USE + "; extrema(torch.ones(1, 2, 1, 3))")
        assert result.returncode == 0, result.stderr
        assert result.stdout.startswith("[1.0, 1.0]\n")
        assert "they were not built when it was installed" in result.stdout
        assert result.stderr.count("Calipers runs without its native kernels") == 1
        assert "set CALIPERS_NATIVE=0 to silence this" in result.stderr

    @native_only
    def test_tensors_without_memory_of_their_own_are_left_to_torch(self) -> None:
        seen = []

        def is_accepted(values: torch.Tensor) -> bool:
            return native.BACKEND.accepts(Workload((values,)))

        def largest(values: torch.Tensor) -> torch.Tensor:
            seen.append(is_accepted(values))
            return values.amax((0, -2, -1))

        values = torch.randn(1, 3, 1, 8)
        torch.func.functionalize(largest)(values)
        torch.vmap(largest)(values.unsqueeze(0))
        largest(values.as_subclass(type("Wrapped", (torch.Tensor,), {})))
        with FakeTensorMode() as mode:
            largest(mode.from_tensor(values))
        assert seen == [False] * 4
        assert not is_accepted(values.to_sparse())
        assert is_accepted(torch.nn.Parameter(values))

    @pytest.mark.slow
    def test_a_distributed_tensor_is_observed(self) -> None:
        result = python(DISTRIBUTED)
        assert result.returncode == 0, result.stderr
        assert result.stdout == "3.0\n"

    def test_other_dtypes_and_empty_tensors_are_left_to_torch(self) -> None:
        for values in (torch.ones(1, dtype=torch.float64), torch.ones(0), torch.ones(1).to("meta")):
            assert not native.BACKEND.accepts(Workload((values,)))


DISTRIBUTED = """
import tempfile, torch
from torch import distributed as dist
from torch.distributed.tensor import distribute_tensor, Replicate
from compressed_tensors.quantization import QuantizationArgs
from calipers.observers import Observer

with tempfile.NamedTemporaryFile() as file:
    dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    weight = distribute_tensor(torch.tensor([[1.0, -3.0]]), mesh, [Replicate()])
    args = QuantizationArgs(num_bits=8)
    observer = Observer.load_from_registry("memoryless_minmax", base_name="weight", args=args)
    low = observer(weight).min_vals
    print(-float(low.full_tensor()))
    dist.destroy_process_group()
"""

LONG_SEARCH = """
import os, signal, sys, threading, time, torch
from compressed_tensors.quantization import QuantizationArgs
from calipers.kernels.search import RangeSearch, search_range

torch.set_num_threads(3)
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts this may ignore it
def threads():
    return len(os.listdir("/proc/self/task"))

values = torch.randn(1, 1024, 8, 1, 128)
low, high = values.amin((0, -2, -1)), values.amax((0, -2, -1))
factors = [1 - i / 1_000_000 for i in range(100_000)]
args = QuantizationArgs(num_bits=4)
search_range(RangeSearch(values, low, high, args, factors=factors[:10], norm=2.4))
before = threads()
print("ready", flush=True)
try:
    search_range(RangeSearch(values, low, high, args, factors=factors, norm=2.4))
except KeyboardInterrupt:
    print("interrupted", threads() - before, flush=True)
low, high = search_range(RangeSearch(values, low, high, args, factors=factors[:10], norm=2.4))
print("works", bool(high.isfinite().all()), flush=True)
"""


@native_only
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.slow
def test_an_interrupted_search_leaves_no_thread_behind() -> None:
    command = [sys.executable, "-c", LONG_SEARCH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted 0\n"
        assert process.stdout.readline() == "works True\n"
    assert process.returncode == 0


THREADS_OF_A_PROCESS = """
import os, signal, torch
from calipers.kernels.reductions import extrema

torch.set_num_threads(4)
values = torch.randn(1, 1, 1, 1 << 22)
wanted = [float(each) for each in values.aminmax()]
def threads():
    return len(os.listdir("/proc/self/task"))

def right():
    return [float(each) for each in extrema(values)[:2]] == wanted

before = threads()
print(all(right() for _ in range(20)), threads() - before, flush=True)
if os.fork() == 0:
    signal.alarm(60)  # for one that waits for threads it does not have
    print(right(), threads(), flush=True)
    os._exit(0)
os.wait()
print(right())
"""


@native_only
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.slow
def test_threads_wait_for_the_next_call_and_a_forked_process_has_its_own() -> None:
    assert python(THREADS_OF_A_PROCESS).stdout == "True 3\nTrue 4\nTrue\n"


@native_only
def test_other_python_threads_go_on() -> None:
    """The GIL is free while a kernel works: a counter in Python keeps counting."""
    values = torch.randn(1, 512, 8, 1, 128)
    low, high = values.amin((0, -2, -1)), values.amax((0, -2, -1))
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = ticks[0]
        factors = [1 - i / 10_000 for i in range(2000)]
        search_range(
            RangeSearch(values, low, high, QuantizationArgs(num_bits=4), factors=factors, norm=2.4)
        )
        assert ticks[0] > before + 5
    finally:
        done.set()
        thread.join()


@native_only
@pytest.mark.slow
class TestMoreThanTwoToThe31:
    """Zeros that were never written take no memory."""

    count = 2**31 + 4099

    def values(self) -> torch.Tensor:
        values = torch.zeros(self.count, dtype=torch.bfloat16)
        values[-1], values[-2], values[5] = 3.0, -2.0, 1.0
        return values.reshape(1, 1, 1, self.count)

    def test_one_piece(self) -> None:
        values = self.values()
        found = extrema(values)
        assert (found.min_vals.item(), found.max_vals.item()) == (-2.0, 3.0)
        args = QuantizationArgs(num_bits=8, type="float")
        _, high = search_range(RangeSearch(values, *found[:2], args, factors=[0.5, 1.0], norm=2.0))
        assert high.item() == 3.0
        counts = count_values(values)
        assert int(counts[0, 0]) == self.count - 3
        assert [int(counts[0, code]) for code in (0x4040, 0xC000, 0x3F80)] == [1, 1, 1]

    def test_many_pieces(self) -> None:
        rows = self.count // 4096
        values = self.values().flatten()[-rows * 4096 :].reshape(1, rows, 1, 1, 4096)
        found = extrema(values)
        assert (found.min_vals[-1].item(), found.max_vals[-1].item()) == (-2.0, 3.0)
        assert not found.max_vals[1:-1].any()
        args = QuantizationArgs(num_bits=4)
        _, high = search_range(RangeSearch(values, *found[:2], args, factors=[0.5, 1.0], norm=2.0))
        assert high[-1].item() == 3.0
