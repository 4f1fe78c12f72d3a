"""Rounded values, their errors and packed codes, natively."""

from __future__ import annotations

import math

import torch
from compressed_tensors.quantization import QuantizationType
from torch import Tensor

from calipers.kernels.native import BACKEND, library, numbers_of
from calipers.kernels.operations import Declined
from calipers.kernels.resources import num_threads
from calipers.kernels.rounding import (
    IN_BYTES,
    IN_PAIRS,
    IN_WORDS,
    Packing,
    Quantization,
    pack,
    quantize,
    sum_errors,
)
from calipers.numerics.formats import GRIDS, Grid
from calipers.numerics.layout import as_grid


@pack.register(BACKEND)
def _pack(asked: Packing, shared: tuple[int, int]) -> Tensor | Declined:
    grid = _grid(asked)
    if grid is None:
        return Declined("the codes are not known")
    working = torch.promote_types(asked.weight.dtype, asked.scale.dtype)
    packed, bits = _empty(asked)
    height, width = shared
    blocks = library().Blocks(
        scales=asked.scale.detach().float().contiguous(),
        zeros=_zeros(asked),
        height=height,
        width=width,
    )
    has_nan = library().pack(
        values=as_grid(asked.weight[None, None, None], ordered=True),
        blocks=blocks,
        working=str(working).removeprefix("torch."),
        numbers=numbers_of(grid),
        offset=-grid.limits[0] if asked.form in IN_WORDS else 0.0,
        bits=bits,
        packed=packed.view(torch.uint8),
        threads=num_threads(),
    )
    # What a NaN becomes depends on the machine: compressed-tensors knows.
    return Declined("there is a NaN") if has_nan else packed


def _empty(asked: Packing) -> tuple[Tensor, int]:
    """Return a place for the packed codes, and how many bits each takes."""
    rows, columns = asked.weight.shape
    if asked.form in IN_WORDS:
        bits, dtype = asked.args.num_bits, torch.int32
    elif asked.form in IN_PAIRS:
        bits, dtype = 4, torch.uint8
    else:
        bits, dtype = 8, asked.args.pytorch_dtype()
    size = -(-columns * bits // (8 * dtype.itemsize))
    return asked.weight.new_empty(rows, size, dtype=dtype), bits


def _zeros(asked: Packing) -> Tensor:
    """Return what is added to quotients, one number or those of all blocks.

    Without zero points a quotient of −0 stays −0, and that has a code of its own in fp8; what
    rounds to fp4 makes it 0.
    """
    if asked.zero_point is None:
        zeros = torch.tensor([-0.0], device="cpu")
    else:
        zeros = asked.zero_point.detach().to(asked.weight.dtype).float().contiguous()
    return zeros + 0.0 if asked.form in IN_PAIRS else zeros


def _grid(asked: Packing) -> Grid | None:
    """Return the numbers that the codes stand for; None where the kernel does not know its way."""
    kind, bits = QuantizationType(asked.args.type).value, asked.args.num_bits
    is_whole = kind == "int" and bits in range(2, 9)
    if asked.form in IN_PAIRS:
        is_known = (kind, bits) == ("float", 4) and asked.weight.shape[1] % 2 == 0
    else:
        is_known = is_whole or ((kind, bits) == ("float", 8) and asked.form in IN_BYTES)
    of_cpu = all(part is None or part.device.type == "cpu" for part in asked[1:3])
    is_known = is_known and of_cpu and asked.scale.dtype in (BACKEND.accepts.dtypes or ())
    return GRIDS.get((kind, bits)) if is_known else None


@quantize.register(BACKEND)
def _values_and_errors(asked: Quantization) -> tuple[Tensor, Tensor]:
    pieces = asked.pieces
    observations, *shape, rows, columns = pieces.shape
    by_piece = pieces.new_empty(math.prod(shape), observations, rows, columns)
    errors = _run(asked, by_piece)
    return by_piece.movedim(1, 0).reshape(pieces.shape), errors


@sum_errors.register(BACKEND)
def _errors(asked: Quantization) -> Tensor:
    return _run(asked)


def _run(asked: Quantization, output: Tensor | None = None) -> Tensor:
    """Return the errors; the quantized values go nowhere but into ``output``, if it is given."""
    kernels = library()
    grid, shape = as_grid(asked.pieces, ordered=True), asked.pieces.shape[1:-2]
    count, zero_point = shape.numel(), asked.zero_point
    errors = asked.pieces.new_empty(kernels.quantize_chunks(grid), count, dtype=torch.float64)
    kernels.quantize(
        values=grid,
        weights=None if asked.weights is None else as_grid(asked.weights, ordered=True),
        scales=asked.scale.detach().float().reshape(count).contiguous(),
        zero_points=None if zero_point is None else zero_point.float().reshape(count).contiguous(),
        working=str(asked.working).removeprefix("torch."),
        numbers=numbers_of(asked.fmt.grid),
        norm=asked.norm,
        output=output,
        errors=errors,
        threads=num_threads(),
    )
    return errors.sum(0).reshape(shape)
