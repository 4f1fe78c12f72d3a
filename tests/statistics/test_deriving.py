"""What a statistic derives from others is what it would have measured itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from calipers import Observer
from calipers.observers.classic import StaticMinMaxObserver
from calipers.observers.options import MovingAverageOptions
from calipers.statistics.base import Statistic
from calipers.statistics.ranges import Extrema, MovingAverage
from calipers.statistics.sums import BlockHessians, SquareSums, TokenSquares
from calipers.statistics.value_counts import ValueCounts

CHANNELS = 24
CHANNEL = QuantizationArgs(num_bits=8, strategy="group", group_size=1)
NVFP4 = QuantizationArgs(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=8,
    dynamic=False,
    scale_dtype=torch.float8_e4m3fn,
)
INT8 = QuantizationArgs(num_bits=8)


def batches(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 7, CHANNELS, generator=generator).to(dtype) for _ in range(3)]


def shown(statistic: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    for batch in batches(dtype):
        statistic.update(batch)
    return statistic


def known(dtype: torch.dtype = torch.bfloat16) -> list[Statistic]:
    """All that ``measure`` collects of an input."""
    kept = [
        *(ValueCounts(), Extrema(), Extrema("input", CHANNEL), SquareSums()),
        BlockHessians(CHANNELS),
    ]
    return [shown(each, dtype) for each in kept]


def observer(name: str, args: QuantizationArgs, **options: Any) -> Observer:
    return Observer.load_from_registry(name, base_name="input", args=args, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SquareSums(nonfinite="keep"),
        lambda: BlockHessians(8),
        lambda: BlockHessians(CHANNELS),
        lambda: Extrema("input", NVFP4),
        lambda: observer("static_minmax", INT8),
        lambda: observer("static_minmax", NVFP4),
        lambda: observer("histogram_mse", INT8, nonfinite="ignore"),
        lambda: observer("percentile", INT8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_field_is_that_of_one_that_was_shown_the_data(make: Any, dtype: torch.dtype) -> None:
    derived, measured = make(), shown(make(), dtype)
    assert derived.derive_from(known(dtype))
    found, expected = derived.fields(), measured.fields()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-5, msg=name)
    assert derived.num_tokens == 42


def test_squares_of_tokens_come_from_counts() -> None:
    derived = TokenSquares()
    assert derived.derive_from(known())
    exact = sum(batch.double().square().sum() for batch in batches())
    torch.testing.assert_close(derived.square_sum, torch.as_tensor(exact).reshape(1))
    assert derived.num_tokens == 42
    assert not TokenSquares().derive_from([shown(SquareSums())])


class Clipping(StaticMinMaxObserver):
    """Looks at tensors in a way of its own."""

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        super().update_statistics_from_observed(observed.clamp(-1, 1))


class Averaging(StaticMinMaxObserver):
    """Looks at tensors as min-max does, and keeps an average."""

    Options = MovingAverageOptions
    Range = MovingAverage


@pytest.mark.parametrize(
    "statistic",
    [
        BlockHessians(7),
        Extrema("output"),
        observer("minmax", INT8),
        observer("memoryless_minmax", INT8),
        observer("mse", INT8),
        Clipping("input", INT8),
        Averaging("input", INT8),
    ],
)
def test_unsupported_modules_derived_stays_empty(statistic: Any) -> None:
    assert not statistic.derive_from(known())
    assert not statistic.fields()


def test_what_was_left_out_is_not_what_was_kept() -> None:
    ignoring = SquareSums(nonfinite="ignore")
    ignoring.update(torch.tensor([[1.0, torch.inf], [2.0, 3.0]]))
    assert not SquareSums(nonfinite="keep").derive_from([ignoring])
    assert SquareSums(nonfinite="ignore").derive_from([ignoring])
