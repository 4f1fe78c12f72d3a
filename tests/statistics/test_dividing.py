"""What is known of a tensor when each of its channels is divided by a factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from calipers.statistics.base import Statistic
from calipers.statistics.ranges import Extrema
from calipers.statistics.sums import BlockHessians, Sensitivity, SquareSums
from calipers.statistics.value_counts import ValueCounts

CHANNEL = QuantizationArgs(num_bits=8, strategy="group", group_size=1)
WHOLE = QuantizationArgs(num_bits=8, strategy="tensor")


@pytest.mark.parametrize(
    "make",
    [
        SquareSums,
        lambda: BlockHessians(8),
        lambda: BlockHessians(4),
        lambda: Extrema("input", CHANNEL),
    ],
)
def test_it_is_that_of_the_divided_tensor(make: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, 8, generator=generator)
    factors = torch.rand(8, generator=generator) * 4 + 0.1
    seen, expected = make(), make()
    seen.update(x)
    expected.update(x / factors)
    divided = seen.divided_by(factors)
    assert seen.can_be_divided
    assert divided.configuration() == seen.configuration()
    assert divided.num_tokens == 35
    for name, value in expected.fields().items():
        torch.testing.assert_close(divided.fields()[name], value, rtol=1e-5, atol=1e-5)
    assert make().divided_by(factors).fields() == {}


def test_sensitivity_is_that_of_the_multiplied_column() -> None:
    inputs, outputs = torch.randn(9, 8), torch.randn(9, 3)
    factors = torch.rand(8) + 0.5
    seen, expected = Sensitivity(), Sensitivity()
    seen.add(outputs.T @ inputs, 9)
    expected.add(outputs.T @ (inputs / factors), 9)
    divided = seen.divided_by(factors).per_token()
    torch.testing.assert_close(divided, expected.per_token(), rtol=1e-5, atol=0)


def test_extrema_of_the_whole_follow_from_those_of_channels() -> None:
    x = torch.randn(5, 8)
    channels, whole, derived = (Extrema("input", each) for each in (CHANNEL, WHOLE, WHOLE))
    channels.update(x)
    whole.update(x)
    assert derived.derive_from([channels])
    for name, value in whole.fields().items():
        assert torch.equal(derived.fields()[name], value), name


@pytest.mark.parametrize("statistic", [ValueCounts("input"), Extrema("input", WHOLE)])
def test_what_is_of_all_channels_does_not_follow(statistic: Statistic) -> None:
    statistic.update(torch.randn(5, 8))
    assert not statistic.can_be_divided
    assert statistic.divided_by(torch.ones(8)) is None
