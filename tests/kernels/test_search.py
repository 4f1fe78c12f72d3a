from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import reference
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DISTRIBUTIONS

from calipers.kernels import search
from calipers.kernels.extrema import extrema
from calipers.kernels.search import search_range
from calipers.numerics.layout import flatten_for_calibration

INT4 = QuantizationArgs(num_bits=4, group_size=8)
FACTORS = [1 - i / 10 for i in range(10)]


def run(view: torch.Tensor, args: QuantizationArgs = INT4, **options: object) -> torch.Tensor:
    """Search, and return the index of the chosen factor of each piece."""
    options = {"factors": FACTORS, "norm": 2.0, **options}
    found = extrema(view.unsqueeze(-2))
    low, high = search_range(view.unsqueeze(-2), found.min_vals, found.max_vals, args, **options)
    largest = torch.maximum(-found.min_vals, found.max_vals)
    ratio = torch.maximum(-low, high).double() / largest.double()
    return (ratio[..., None] - torch.tensor(options["factors"])).abs().argmin(-1)


def grouped(weight: torch.Tensor) -> torch.Tensor:
    return flatten_for_calibration(weight, "weight", INT4)


def float64_errors(weight: torch.Tensor, norm: float, **options: object) -> np.ndarray:
    low, high = reference.extrema(weight, "weight", INT4)
    return reference.candidate_errors(weight, "weight", INT4, low, high, FACTORS, norm, **options)


@pytest.mark.parametrize("norm", [0.5, 1.0, 2.0, 2.4, 3.0, 7.5])
@pytest.mark.parametrize("distribution", ["gaussian", "student_t", "one_outlier", "positive"])
def test_finds_the_least_error(distribution: str, norm: float) -> None:
    weight = DISTRIBUTIONS[distribution]((5, 24))
    chosen = run(grouped(weight), norm=norm).flatten()
    errors = float64_errors(weight, norm)
    assert (errors[chosen, np.arange(15)] <= errors.min(0) * (1 + 1e-5)).all()


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-9, 1e9, 1e18, 1e30])
@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0])
def test_the_choice_does_not_depend_on_the_unit(scale: float, norm: float) -> None:
    """Errors of huge or tiny values would overflow or vanish in float32."""
    power = 2.0 ** round(np.log2(scale))
    view = grouped(torch.randn(16, 64))
    assert torch.equal(run(view * power, norm=norm), run(view, norm=norm))


def test_pieces_of_very_different_size() -> None:
    """One huge group must not decide for a tiny one."""
    view = grouped(torch.randn(3, 8))
    mixed = view * torch.tensor([2.0**-90, 1.0, 2.0**90])[None, :, None, None]
    assert torch.equal(run(mixed, norm=2.4), run(view, norm=2.4))


def test_weights_count() -> None:
    weight = torch.randn(6, 16)
    importance = np.array([100.0, *[0.01] * 7, *[1.0] * 8])
    weights = torch.from_numpy(importance).reshape(2, 8)
    chosen = run(grouped(weight), weights=weights).flatten()
    errors = float64_errors(weight, 2.0, importance=importance)
    assert (errors[chosen, np.arange(12)] <= errors.min(0) * (1 + 1e-5)).all()
    assert not torch.equal(chosen, run(grouped(weight)).flatten())


@pytest.mark.parametrize("tile", [1, 7, 24, 1 << 18])
@pytest.mark.parametrize("shape", [(1, 5, 3, 8), (6, 4, 8), (9, 1, 24), (1, 1, 100)])
@pytest.mark.parametrize("weighted", [False, True])
def test_tiles_do_not_show(shape: tuple[int, ...], tile: int, weighted: bool) -> None:
    view = torch.randn(shape)
    weights = torch.rand(shape[-2], shape[-1]) if weighted and shape[1] > 1 else None
    whole = run(view, weights=weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(search._TILE, "cpu", tile)
        assert torch.equal(run(view, weights=weights), whole)


def test_a_later_candidate_must_be_strictly_better() -> None:
    zeros = torch.zeros(1, 3, 8)
    low, high = search_range(
        zeros.unsqueeze(-2), zeros[0, :, 0] - 1, zeros[0, :, 0] + 1, INT4, factors=FACTORS, norm=2.0
    )
    assert high.tolist() == [1.0] * 3
    assert low.tolist() == [-1.0] * 3


class TestPatience:
    """Errors that first rise and then fall: the best candidate is the sixth of int2."""

    args = QuantizationArgs(num_bits=2)
    view = torch.tensor([[[1.0, *[0.25] * 30]]])

    def errors(self) -> list[float]:
        low, high = torch.tensor([0.25]), torch.tensor([1.0])
        found = reference.candidate_errors(
            self.view.reshape(-1), "weight", self.args, low, high, FACTORS, 2.0
        )
        return list(found[:, 0])

    def stopped_at(self, patience: int) -> int:
        """Replay the definition by hand."""
        best, best_index, vain = np.inf, 0, 0
        for index, error in enumerate(self.errors()):
            if error < best:
                best, best_index, vain = error, index, 0
            else:
                vain += 1
                if vain >= patience:
                    break
        return best_index

    @pytest.mark.parametrize("patience", [0, 1, 2, 3, 4, 5, 8, 100])
    def test_as_defined(self, patience: int) -> None:
        assert run(self.view, self.args, patience=patience).item() == self.stopped_at(patience)

    def test_the_example_does_what_it_is_there_for(self) -> None:
        assert len({self.stopped_at(patience) for patience in (1, 100)}) > 1

    def test_none_is_endless(self) -> None:
        assert run(self.view, self.args).item() == int(np.argmin(self.errors()))

    def test_one_piece_that_improves_keeps_all_going(self) -> None:
        args = QuantizationArgs(num_bits=2, group_size=31)
        falling = torch.tensor([[[1.0, *[0.4] * 30]]])  # better with each of the first candidates
        together = torch.cat([self.view, falling], 1)
        assert run(self.view, args, patience=1).tolist() == [0]
        assert run(together, args, patience=1).tolist() == [6, 4]

    @pytest.mark.parametrize("patience", [0, 1, 3, 5])
    def test_devices_that_are_not_asked_agree(
        self, patience: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Elsewhere than on a CPU the search runs on, but nothing it finds may count."""
        eager = run(self.view, self.args, patience=patience)
        monkeypatch.setattr(search, "_asks_freely", lambda _: False)
        assert torch.equal(run(self.view, self.args, patience=patience), eager)


def test_float64_is_searched_in_float64() -> None:
    view = torch.randn(1, 3, 8, dtype=torch.float64)
    found = extrema(view.unsqueeze(-2))
    chosen = run(view, factors=[0.7, 0.3])
    low, high = search_range(
        view.unsqueeze(-2), found.min_vals, found.max_vals, INT4, factors=[0.7, 0.3], norm=2.0
    )
    factors = torch.tensor([0.7, 0.3], dtype=torch.float64)[chosen]
    assert torch.equal(low, found.min_vals * factors)
    assert torch.equal(high, found.max_vals * factors)


def test_a_range_wider_than_float16_is_searched() -> None:
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="channel")
    weight = torch.randn(4, 64) * 12000
    weight[:, 0], weight[:, 1] = 50000, -50000
    view = flatten_for_calibration(weight, "weight", args)
    factors = [1 - i / 100 for i in range(20)]
    exact = run(view, args, factors=factors)
    half = run(view.half(), args, factors=factors)
    assert (exact - half).abs().max() <= 1
    assert half.min() > 0


def test_no_factors_leave_the_range() -> None:
    view = torch.randn(1, 3, 8)
    found = extrema(view.unsqueeze(-2))
    low, high = search_range(
        view.unsqueeze(-2), found.min_vals, found.max_vals, INT4, factors=[], norm=2.0, expand=2.0
    )
    assert torch.equal(low, found.min_vals * 2)
    assert torch.equal(high, found.max_vals * 2)


MEASURE = """
import resource, torch
from compressed_tensors.quantization import QuantizationArgs
from calipers.observers import Observer

args = QuantizationArgs({kwargs})
def search(weight):
    # Memory does not depend on the number of candidates; two are enough.
    Observer.load_from_registry(
        "memoryless_mse", base_name="weight", args=args, maxshrink=0.02, norm=2.0
    )(weight).get_qparams()

search(torch.randn(256, 256).bfloat16())
weight = torch.empty({size}, {size}, dtype=torch.bfloat16)
weight[:256] = torch.randn(256, {size})
for row in range(256, {size}, 256):
    weight[row : row + 256] = weight[:256]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
search(weight)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize(
    "kwargs",
    [
        "num_bits=4, group_size=128",
        "num_bits=4, type='float', strategy='tensor_group', group_size=16,"
        " scale_dtype=torch.float8_e4m3fn",
        "num_bits=8, type='float', strategy='block', block_structure=[128, 128]",
    ],
)
def test_memory_is_bounded(kwargs: str) -> None:
    """At 16,384 × 16,384 the limit is 1 GiB; a quarter of the values, a quarter of the limit."""
    script = MEASURE.format(kwargs=kwargs, size=8192)
    # Beside a busy process, threads that wait by spinning make this ten times slower.
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},
    )
    assert int(result.stdout) < 2**28
