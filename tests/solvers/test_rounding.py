"""Learned rounding: its gradients against finite differences, its steps against torch's Adam."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.hessian import Rounding
from calipers.numerics.formats import FP8_DTYPE, Format, storable_scales
from calipers.solvers.gptq import Scales
from calipers.solvers.rounding import Adam, RelaxedWeight

GRID = {
    "int4": QuantizationArgs(num_bits=4, strategy="group", group_size=4),
    "int3, zero points": QuantizationArgs(
        num_bits=3, symmetric=False, strategy="group", group_size=4
    ),
    "fp8": QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=4),
    "NVFP4": QuantizationArgs(
        num_bits=4, type="float", strategy="tensor_group", group_size=4, scale_dtype=FP8_DTYPE
    ),
    "MXFP4": QuantizationArgs(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    ),
}
ROWS, COLUMNS, GROUPS = 6, 32, 8


def relaxed(name: str, dtype: torch.dtype, rows: int = 1) -> RelaxedWeight:
    """A rounded weight of random codes, with zero points where its format has them."""
    fmt = Format.of(GRID[name])
    generator = torch.Generator().manual_seed(0)
    groups = torch.arange(COLUMNS) * GROUPS // COLUMNS
    exponents = torch.randint(-4, 1, (-(-ROWS // rows), GROUPS), generator=generator)
    scales = exponents.float().exp2().repeat_interleave(rows, 0)[:ROWS]
    zeros = None
    if not fmt.symmetric:
        zeros = torch.randint(-2, 3, scales.shape, generator=generator).float()
    numbers = fmt.values()
    codes = numbers[torch.randint(0, len(numbers), (ROWS, COLUMNS), generator=generator)]
    values = (codes if zeros is None else codes - zeros[:, groups]) * scales[:, groups]
    storable = storable_scales(fmt, dtype)
    return RelaxedWeight.of(values, Rounding(scales, zeros, groups, fmt), Scales(storable, rows))


def line(positions: Tensor, numbers: Tensor) -> Tensor:
    """The line through the numbers, in float64, constant beyond both ends."""
    inside = positions.double().clamp(0, len(numbers) - 1)
    below = inside.floor().long().clamp(max=len(numbers) - 2)
    numbers = numbers.double()
    return numbers[below] + (inside - below) * (numbers[below + 1] - numbers[below])


@pytest.mark.parametrize("name", GRID)
def test_gradients_are_those_of_the_line_through_the_numbers(name: str) -> None:
    weight, h = relaxed(name, torch.float32), 2.0**-12
    offsets = weight.offsets()
    assert offsets.scales.requires_grad == (name != "MXFP4")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # on numbers, and between them
        offsets.codes.copy_(torch.randint(-3, 4, offsets.codes.shape, generator=generator) / 8)
        weight.confine_(offsets)
    pulls = torch.randn(ROWS, COLUMNS, generator=generator)
    loss = (weight.weight(offsets) * pulls).sum()
    parameters = [each for each in offsets if each.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    positions = weight.positions + offsets.codes.detach()
    slopes = (line(positions + h, weight.numbers) - line(positions - h, weight.numbers)) / (2 * h)
    groups = weight.rounding.groups
    expected = pulls * slopes * weight.rounding.scales[:, groups]
    # At the ends of a format nothing lies beyond: half the slope within.
    ends = (positions == 0) | (positions == len(weight.numbers) - 1)
    expected = torch.where(ends, 2 * expected, expected)
    torch.testing.assert_close(gradients[0].double(), expected, rtol=1e-6, atol=1e-6)
    if len(gradients) == 2:
        values = weight.weight(weight.offsets()._replace(codes=offsets.codes)).detach() * pulls
        by_group = torch.zeros(ROWS, GROUPS).index_add_(1, groups, values)
        torch.testing.assert_close(gradients[1], by_group)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", GRID)
def test_offsets_move_codes_by_one_at_most_and_scales_to_storable_ones(
    name: str, rows: int
) -> None:
    weight = relaxed(name, torch.bfloat16, rows)
    offsets = weight.offsets()
    start = weight.weight(offsets).detach()
    groups, before = weight.rounding.groups, weight.rounding.scales
    with torch.no_grad():
        offsets.codes.fill_(9.0)
        weight.confine_(offsets)
    codes = weight.weight(offsets).detach() / before[:, groups]
    next_one = weight.numbers[(weight.positions.long() + 1).clamp(max=len(weight.numbers) - 1)]
    zeros = 0 if weight.rounding.zeros is None else weight.rounding.zeros[:, groups]
    assert torch.equal(codes, next_one - zeros)
    offsets = weight.offsets()
    with torch.no_grad():
        offsets.codes.fill_(0.49)
        offsets.scales.fill_(0.2)
        weight.confine_(offsets)
    scales = weight.moved_scales(offsets).detach()
    if name == "MXFP4":
        assert torch.equal(weight.weight(offsets), start)
        return
    assert scales.shape == before.shape
    assert torch.equal(scales, scales.to(torch.bfloat16).float())
    assert float((scales / before - 1.2).abs().max()) < (0.1 if name == "NVFP4" else 0.004)
    for first in range(0, ROWS, rows):
        assert bool((scales[first : first + rows] == scales[first]).all())


def test_adam_is_that_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.ones(5, 3, requires_grad=True) for _ in range(2))
    mine, other = Adam([ours], [0.02]), torch.optim.Adam([theirs], 0.02, (0.9, 0.99), eps=1e-12)
    untouched = torch.randn(4)
    kept, idle = untouched.clone(), Adam([untouched], [1.0])
    for _ in range(20):
        theirs.grad = torch.randn(5, 3, generator=generator)
        mine.step([theirs.grad])
        other.step()
        idle.step([torch.zeros(4)])
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(untouched, kept)
