"""Candidates chosen together: the native version against the one in torch."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import DTYPES, FORMATS
from engines import NATIVE_ENGINES, engine_in_use, threads_in_use, with_engines
from geometries import MEMORIES, pieces
from torch import Tensor

from calipers.kernels.hessian import choose_candidates, quadratic_error

# (grid rows, blocks, pieces of a block, columns)
SHAPES = [(1, 1, 2, 1), (3, 2, 3, 7), (70, 2, 4, 16), (33, 1, 3, 40), (40, 3, 2, 128)]
CANDIDATES = 9


def hessian_of(blocks: int, width: int) -> Tensor:
    x = torch.randn(2 * width, blocks, width) @ torch.randn(width, width) / width**0.5 + 0.3
    return torch.einsum("tbi,tbj->bij", x, x) / len(x)


def problem(
    shape: tuple[int, ...], kind: str, memory: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    rows, blocks, places, columns = shape
    grid = (1, rows, blocks * places, 1, columns)
    values = torch.randn(grid)
    values.view(-1)[:: max(2, values.numel() // 5)] = float("nan")
    highest = QuantizationArgs(**FORMATS[kind]).num_bits
    scales = (torch.rand(rows, blocks * places, CANDIDATES) + 0.5) * 5 / 2**highest
    scales *= torch.randn(scales.shape).sign()
    zeros = torch.randint(-2, 3, scales.shape).float()
    hessian = hessian_of(blocks, places * columns)
    return pieces(memory, grid, values.to(dtype)), scales, zeros, hessian


@with_engines(
    "shape, kind, memory, dtype",
    SHAPES,
    ["int3", "int4_asym", "int8", "fp8_asym", "fp4"],
    list(MEMORIES),
    DTYPES,
    engines=NATIVE_ENGINES,
)
def test_as_good_as_in_torch(
    shape: tuple[int, ...], kind: str, memory: str, dtype: torch.dtype
) -> None:
    given = problem(shape, kind, memory, dtype)
    args = QuantizationArgs(**FORMATS[kind])
    found = choose_candidates(*given, args)
    with engine_in_use("torch"):
        expected = choose_candidates(*given, args)
    ours, theirs = (error(given, at, args) for at in (found, expected))
    assert ours <= theirs * (1 + 1e-5)
    assert (found == expected).float().mean() >= 0.98  # ties fall to either side


def error(given: tuple[Tensor, ...], at: Tensor, args: QuantizationArgs) -> float:
    values, *parameters, hessian = given
    scale, zero = (part.gather(-1, at[..., None])[..., 0] for part in parameters)
    return quadratic_error(values, scale, zero, hessian, args)


@pytest.mark.parametrize("engine", NATIVE_ENGINES[:1], indirect=True)
def test_threads_do_not_matter() -> None:
    given = problem((300, 4, 2, 128), "int4", "contiguous", torch.float32)
    args = QuantizationArgs(num_bits=4)
    found = []
    for threads in (1, 2, 5):
        with threads_in_use(threads):
            found.append(choose_candidates(*given, args))
    assert all(torch.equal(found[0], other) for other in found[1:])
