"""Packed codes, their errors and those of pieces, natively."""

from __future__ import annotations

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
    Packed,
    Packing,
    Quantization,
    pack,
    quantization_errors,
)
from calipers.numerics.formats import GRIDS, Format, Grid
from calipers.numerics.layout import as_grid


@pack.register(BACKEND)
def _pack(asked: Packing) -> Packed | Declined:
    weight, scale, zero_point, args, form, with_values = asked
    shared = asked.shared()
    grid = None if shared is None else _grid(asked)
    if shared is None or grid is None:
        return Declined("the codes, or the shape of the scales, are not known")
    rows, columns = weight.shape
    bits, codes = args.num_bits, None
    if form is not None:
        bits = args.num_bits if form in IN_WORDS else 4 if form in IN_PAIRS else 8
        dtype = args.pytorch_dtype() if form in IN_BYTES else torch.uint8
        dtype = torch.int32 if form in IN_WORDS else dtype
        codes = weight.new_empty(rows, -(-columns * bits // (8 * dtype.itemsize)), dtype=dtype)
    # Without zero points a quotient of −0 stays −0, and that has a code of its own in fp8; what
    # rounds to fp4 makes it 0.
    zeros = torch.tensor([-0.0], device="cpu") if zero_point is None else zero_point.detach()
    zeros = zeros.to(weight.dtype).float().contiguous()
    errors = weight.new_empty(columns, dtype=torch.float64)
    values = weight.new_empty(rows, columns, dtype=torch.float32) if with_values else None
    has_nan = library().encode(
        values=as_grid(weight[None, None, None], ordered=True),
        blocks=library().Blocks(
            scales=scale.detach().float().contiguous(),
            zeros=zeros + 0.0 if form in IN_PAIRS else zeros,
            height=shared[0],
            width=shared[1],
        ),
        working=str(torch.promote_types(weight.dtype, scale.dtype)).removeprefix("torch."),
        numbers=numbers_of(grid),
        offset=-grid.limits[0] if form in IN_WORDS else 0.0,
        bits=bits,
        packed=None if codes is None else codes.view(torch.uint8),
        output=values,
        errors=errors,
        threads=num_threads(),
    )
    # What a NaN becomes depends on the machine: compressed-tensors knows.
    return Declined("there is a NaN") if has_nan else Packed(codes, errors, values)


def _grid(asked: Packing) -> Grid | None:
    """Return the numbers that the codes stand for; None where the kernel does not know its way."""
    weight, scale, zero_point, args, form, _ = asked
    kind, bits = QuantizationType(args.type).value, args.num_bits
    if form in IN_PAIRS:
        is_known = (kind, bits) == ("float", 4) and weight.shape[1] % 2 == 0
    elif form is None:
        is_known = bits <= 8
    else:
        is_whole = kind == "int" and bits in range(2, 9)
        is_known = is_whole or ((kind, bits) == ("float", 8) and form in IN_BYTES)
    of_cpu = all(part is None or part.device.type == "cpu" for part in (scale, zero_point))
    is_known = is_known and of_cpu and scale.dtype in (BACKEND.accepts.dtypes or ())
    return GRIDS.get((kind, bits)) if is_known else None


@quantization_errors.register(BACKEND)
def _quantization_errors(asked: Quantization) -> Tensor:
    kernels, weights, fmt = library(), asked.expanded_weights(), Format.of(asked.args)
    grid, shape = as_grid(asked.pieces, ordered=True), asked.pieces.shape[1:-2]
    count, zero_point = shape.numel(), None if fmt.symmetric else asked.zero_point
    errors = asked.pieces.new_empty(kernels.quantize_chunks(grid), count, dtype=torch.float64)
    kernels.quantize(
        values=grid,
        weights=None if weights is None else as_grid(weights, ordered=True),
        scales=asked.scale.detach().float().reshape(count).contiguous(),
        zero_points=None if zero_point is None else zero_point.float().reshape(count).contiguous(),
        numbers=numbers_of(fmt.grid),
        norm=asked.norm,
        errors=errors,
        threads=num_threads(),
    )
    return errors.sum(0).reshape(shape)
