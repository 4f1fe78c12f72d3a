"""What costs are worked out from adds up, whoever read what together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from calipers.errors import ConfigurationMismatchError
from calipers.statistics.activations import ActivationStatistics

INT8 = QuantizationArgs(num_bits=8)
KINDS: list[dict[str, Any]] = [
    {"squares": "channel", "counted": INT8},
    {"squares": "token"},
    {"counted": INT8},
]


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 5, 8, generator=generator).bfloat16() for _ in range(4)]


def of(kind: dict[str, Any], indices: range, mask: torch.Tensor | None = None) -> Any:
    seen = ActivationStatistics("input", **kind)
    for index in indices:
        seen.take(batches()[index], mask)
    return seen


def assert_equal(one: Any, other: Any) -> None:
    assert one.fields().keys() == other.fields().keys() != set()
    for name, value in one.fields().items():
        torch.testing.assert_close(value, other.fields()[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_merging_is_replaying(kind: dict[str, Any]) -> None:
    assert_equal(of(kind, range(2)).merge(of(kind, range(2, 4))), of(kind, range(4)))
    with pytest.raises(ConfigurationMismatchError):
        of(kind, range(1)).merge(of({"squares": "channel"}, range(1)))


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_are_not_there(kind: dict[str, Any]) -> None:
    mask = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    expected = ActivationStatistics("input", **kind)
    expected.take(batches()[0][mask])
    assert_equal(of(kind, range(1), mask), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("goes_on", [0, 1])
def test_who_read_together_can_go_on_alone(kind: dict[str, Any], goes_on: int) -> None:
    both = of(kind, range(2)), ActivationStatistics("input", **kind)
    both[1].share_fields(both[0])
    both[goes_on].take(batches()[2])
    assert_equal(both[goes_on], of(kind, range(3)))
    assert_equal(both[1 - goes_on], of(kind, range(2)))
