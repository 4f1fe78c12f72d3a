"""Errors judged by what they do to the output of a layer."""

from __future__ import annotations

import brute
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from weights import (
    COLUMNS,
    IMPORTANCES,
    arguments,
    blocks_of,
    build,
    gathered,
    inputs,
    layer,
    quadratic,
)

from calipers.errors import (
    ImportanceError,
)
from calipers.statistics.sums import shrunk


@pytest.mark.parametrize("fmt", ["int3", "int4_asym", "fp4"])
@pytest.mark.parametrize(("cut", "width"), [("channel", 64), ("group", 64), ("block", 8)])
def test_the_hessian_judges(cut: str, width: int, fmt: str) -> None:
    args, linear, x = arguments(cut, fmt), layer(6), inputs(1000).bfloat16()
    hessian = shrunk(blocks_of(x, width), len(x))
    found = {}
    for importance in IMPORTANCES:
        observer = gathered(linear, x, args, importance=importance)(linear.weight)
        found[importance] = quadratic(linear.weight, observer.get_qparams(), args, hessian)
    assert found["hessian"] <= found["imatrix"] * (1 + 1e-5)
    assert found["hessian"] < found["none"]


def test_with_a_long_shortlist_no_scale_is_better_by_the_hessian() -> None:
    args = QuantizationArgs(num_bits=3, strategy="channel")
    linear, x = layer(3, 16), inputs(1000, 16).bfloat16()
    hessian = shrunk(blocks_of(x, 16), len(x))
    observer = gathered(linear, x, args, importance="hessian", shortlist=256)(linear.weight)
    qparams = observer.get_qparams()
    scales = brute.floats_of(torch.bfloat16)
    for row in range(3):
        weight = linear.weight[row : row + 1]
        mine = {**qparams, "scale": qparams["scale"][row : row + 1]}
        mine["zero_point"] = qparams["zero_point"][row : row + 1]
        found = quadratic(weight, mine, args, hessian)
        each = [
            quadratic(weight, {**mine, "scale": scale.reshape(1, 1)}, args, hessian)
            for scale in brute.around(scales, weight, octaves=4)
        ]
        assert found <= min(each) * (1 + 1e-5)


def test_one_hessian_serves_every_group_size() -> None:
    linear, x = layer(), inputs().bfloat16()
    gathered(linear, x, QuantizationArgs(num_bits=4, group_size=32), importance="hessian")
    assert linear._hessian_sum.shape == (1, 64, 64)
    heir = build(importance="hessian", strict=True)
    heir.attach(linear)  # picks it up
    direct = gathered(layer(), x, importance="hessian")
    ours, theirs = heir(linear.weight), direct(linear.weight)
    torch.testing.assert_close(ours.get_qparams()["scale"], theirs.get_qparams()["scale"])


def test_hessians_of_another_width() -> None:
    linear = layer(columns=96)
    linear._hessian_sum = torch.eye(48).repeat(2, 1, 1).double()
    linear._hessian_count = torch.tensor(100)
    observer = build(QuantizationArgs(num_bits=4, group_size=32), "hessian", strict=True)
    observer.attach(linear)
    with pytest.raises(ImportanceError) as caught:
        observer(linear.weight)
    assert str(caught.value) == (
        "Observer 'optimal' (weight): the Hessian has blocks of 48 columns, which do not fit "
        "pieces of 32 columns. Gather it with this observer. "
        "With strict=False it would fall back to plain error."
    )


def test_g_idx_tears_a_hessian_apart() -> None:
    linear = layer()
    observer = gathered(linear, inputs(), importance="hessian", strict=True)
    with pytest.raises(ImportanceError, match="neighbouring columns, which g_idx tears apart"):
        observer(linear.weight, g_idx=torch.arange(COLUMNS) % 4)
