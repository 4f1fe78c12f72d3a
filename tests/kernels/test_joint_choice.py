"""Candidates chosen together, against all there are."""

from __future__ import annotations

import itertools

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.hessian import choose_candidates, quadratic_error

ARGS = QuantizationArgs(num_bits=3, strategy="group", group_size=4)


def hessian_of(blocks: int, width: int) -> Tensor:
    x = torch.randn(50, blocks * width) + 1
    parts = x.double().reshape(50, blocks, width)
    return torch.einsum("tbi,tbj->bij", parts, parts) / 50


def error(pieces: Tensor, scales: Tensor, hessian: Tensor) -> float:
    """In float64, by the definition."""
    scales = scales.double()[None, ..., None, None]
    difference = torch.clamp(torch.round(pieces.double() / scales), -4, 3) * scales - pieces
    rows = difference[0].transpose(1, 2).flatten(0, 1).flatten(1)
    blocks = rows.reshape(len(rows), len(hessian), -1)
    return float(torch.einsum("rbi,bij,rbj->", blocks, hessian, blocks))


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("blocks", "width"), [(1, 12), (3, 4), (6, 2), (1, 4)])
def test_nothing_single_can_be_improved(blocks: int, width: int, rows: int) -> None:
    torch.manual_seed(blocks)
    pieces = torch.randn(1, 2, blocks * width // 4, rows, 4)
    scales = torch.rand(*pieces.shape[1:3], 5) + 0.1
    hessian = hessian_of(blocks, width)
    chosen = choose_candidates(pieces, scales, torch.zeros_like(scales), hessian, ARGS)
    assert chosen.shape == pieces.shape[1:3]
    taken = scales.gather(-1, chosen[..., None])[..., 0]
    found = error(pieces, taken, hessian)
    assert found <= error(pieces, scales[..., 0], hessian)
    for row, column, k in itertools.product(*map(range, scales.shape)):
        other = taken.clone()
        other[row, column] = scales[row, column, k]
        assert found <= error(pieces, other, hessian) * (1 + 1e-5)


@pytest.mark.parametrize(("blocks", "width"), [(3, 4), (6, 2)])
def test_without_neighbours_it_is_the_best_of_all(blocks: int, width: int) -> None:
    pieces = torch.randn(1, 1, 3, 1, 4)
    scales = torch.rand(1, 3, 4) + 0.1
    hessian = hessian_of(blocks, width)
    chosen = choose_candidates(pieces, scales, torch.zeros_like(scales), hessian, ARGS)
    found = error(pieces, scales.gather(-1, chosen[..., None])[..., 0], hessian)
    for combination in itertools.product(range(4), repeat=3):
        at = torch.tensor(combination).reshape(1, 3, 1)
        assert found <= error(pieces, scales.gather(-1, at)[..., 0], hessian) * (1 + 1e-5)


@pytest.mark.parametrize(("blocks", "width"), [(1, 12), (3, 4), (6, 2)])
def test_the_error_is_the_quadratic_form(blocks: int, width: int) -> None:
    pieces, scales = torch.randn(1, 2, 3, 2, 4), torch.rand(2, 3) + 0.1
    hessian = hessian_of(blocks, width)
    found = quadratic_error(pieces, scales, torch.zeros(2, 3), hessian, ARGS)
    assert found == pytest.approx(error(pieces, scales, hessian), rel=1e-5)


def test_begins_with_the_last_of_all_where_that_is_better() -> None:
    """Here no single change from the first candidates is a gain, though both together are."""
    pieces = torch.tensor([5.0, 5.0]).reshape(1, 1, 2, 1, 1)
    scales = torch.tensor([[[6.0, 5.1], [4.0, 5.1]]])  # q−x: (1, −1) or (0.1, 0.1)
    hessian = torch.tensor([[[1.0, 0.95], [0.95, 1.0]]])
    args = QuantizationArgs(num_bits=4)
    chosen = choose_candidates(pieces, scales, torch.zeros_like(scales), hessian, args)
    assert chosen.tolist() == [[1, 1]]
