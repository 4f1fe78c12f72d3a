"""Rounding to the numbers of a format: errors, and codes as checkpoints hold them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from torch import Tensor

from calipers.kernels.operations import Workload, operation
from calipers.kernels.resources import TILE, runs
from calipers.numerics.formats import Format
from calipers.numerics.layout import block_height, indivisible_by, scale_shape, shared_columns
from calipers.numerics.qparams import quantize_dequantize

IN_WORDS = frozenset({CompressionFormat.pack_quantized})
"""Formats that hold whole numbers one behind the other, in words of 32 bits."""
IN_PAIRS = frozenset(
    {CompressionFormat.nvfp4_pack_quantized, CompressionFormat.mxfp4_pack_quantized}
)
"""Formats that hold two fp4 codes in a byte."""
IN_BYTES = frozenset(
    {
        CompressionFormat.naive_quantized,
        CompressionFormat.int_quantized,
        CompressionFormat.float_quantized,
        CompressionFormat.mxfp8_quantized,
    }
)
"""Formats that hold a code in each byte."""
PACKED = IN_WORDS | IN_PAIRS | IN_BYTES
"""All formats that :func:`pack_weight` knows."""
_PART = 1 << 19  # values that torch packs at a time


class Packing(NamedTuple):
    """What is packed, by what, and how; a global scale is already divided out.

    :param form: how codes are stored; None: they are not wanted
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    args: QuantizationArgs
    form: CompressionFormat | None
    with_values: bool = False

    def shared(self) -> tuple[int, int] | None:
        """Return how many rows and columns share a scale; None where scales have another shape."""
        weight, args = self.weight, self.args
        if weight.dim() != 2 or not weight.numel() or not self.scale.dim():
            return None
        rows, columns = weight.shape
        if not args.block_structure and indivisible_by(columns, args):
            return None
        expected = scale_shape(weight.shape, args)
        if any(p is not None and p.shape != expected for p in (self.scale, self.zero_point)):
            return None
        height = rows if expected == (1,) else block_height(args)
        return height, shared_columns(args) or columns


class Packed(NamedTuple):
    """The codes of a matrix, and what is lost by them.

    :param codes: as checkpoints hold them, int32, uint8, int8 or float8, (rows, …)
    :param errors: Σ(q−w)² of each column, in float64. NaN and Inf count as no error
    :param values: the numbers that codes stand for, in float32 (float64 for float64)
    """

    codes: Tensor | None
    errors: Tensor
    values: Tensor | None = None


@torch.no_grad()
def pack_weight(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    args: QuantizationArgs,
    form: CompressionFormat | None,
    *,
    with_values: bool = False,
) -> Packed:
    """Quantize a matrix and pack its codes, bit by bit as compressed-tensors does.

    The codes are what its compressor for ``form``, one of those listed here, makes of the weight.
    It computes in the dtype of its tensors, and so does this. Global scales are those of fp4; with
    other codes compressed-tensors leaves them alone.

    :param form: None: the codes are not wanted, only what is lost by them

    >>> args = QuantizationArgs(num_bits=4, strategy="channel")
    >>> row = torch.tensor([[1.0, -2.0, 3.4, 0.5]])
    >>> form = CompressionFormat.pack_quantized
    >>> packed = pack_weight(row, torch.tensor([[1.0]]), None, None, args, form)
    >>> hex(packed.codes), packed.errors[-1]
    ('0x8b69', tensor(0.2500, dtype=torch.float64))
    """
    if global_scale is not None and (form is None or form in IN_PAIRS):
        scale = scale / global_scale
    return pack(Packing(weight, scale, zero_point, args, form, with_values))


@operation(lambda asked: Workload((asked.weight,)))
def pack(asked: Packing) -> Packed:
    """Pack a weight: of a matrix some rows at a time, since it takes many times their memory."""
    shared = asked.shared()
    if shared is None:
        return _pack_in_torch(asked)
    height, (rows, columns) = shared[0], asked.weight.shape
    parts = []
    for blocks in runs(math.ceil(rows / height), each=height * columns, tile=_PART):
        scale, zero_point = (
            None if part is None else part[blocks] for part in (asked.scale, asked.zero_point)
        )
        assert scale is not None
        weight = asked.weight[blocks.start * height : blocks.stop * height]
        part = asked._replace(weight=weight, scale=scale, zero_point=zero_point)
        parts.append(_pack_in_torch(part))
    codes, errors, values = zip(*parts, strict=True)
    return Packed(
        None if asked.form is None else torch.cat(codes),
        torch.stack(errors).sum(0),
        torch.cat(values) if asked.with_values else None,
    )


def _pack_in_torch(asked: Packing) -> Packed:
    weight, scale, zero_point, args, form, with_values = asked
    working = torch.promote_types(weight.dtype, torch.float32)
    rounded = quantize(weight, scale, zero_point, args)
    if form is None:
        codes = None
    elif form in IN_WORDS:
        codes = pack_to_int32(rounded.to(torch.int8), args.num_bits)
    elif form in IN_PAIRS:
        codes = pack_fp4_to_uint8(rounded)
    else:
        codes = rounded.to(args.pytorch_dtype())
    values = dequantize(rounded.to(working), scale.to(working), zero_point, args, dtype=working)
    errors = torch.where(torch.isfinite(weight), values - weight, 0.0).double().square()
    return Packed(codes, errors.flatten(0, -2).sum(0), values if with_values else None)


# Errors of pieces


class Quantization(NamedTuple):
    """What is quantized, by what, and how its error counts; a global scale is divided out.

    :param pieces: (observations, *qparam_shape, rows, columns)
    :param scale: of the qparam shape, and so is ``zero_point``
    :param weights: broadcasts with the pieces
    """

    pieces: Tensor
    scale: Tensor
    zero_point: Tensor | None
    args: QuantizationArgs
    norm: float = 2.0
    weights: Tensor | None = None

    def expanded_weights(self) -> Tensor | None:
        """Return the weights in the shape of the pieces, in float32 or better."""
        if self.weights is None:
            return None
        working = torch.promote_types(self.pieces.dtype, torch.float32)
        return self.weights.to(self.pieces.device, working).expand(self.pieces.shape)


@operation(lambda asked: Workload((asked.pieces,), Format.of(asked.args), asked.norm))
@torch.no_grad()
def quantization_errors(asked: Quantization) -> Tensor:
    """Return Σ w·|q−x|^norm of each piece, in float64.

    The work is done in float32 (float64 for float64), tile by tile: the values themselves are not
    kept. NaN and Inf add no error.

    >>> x = torch.tensor([[[[1.0, 2.2, -3.5]]]])
    >>> asked = Quantization(x, torch.tensor([0.5]), None, QuantizationArgs(num_bits=4))
    >>> quantization_errors(asked)
    tensor([0.0400], dtype=torch.float64)
    """
    pieces, scale, zero_point, args, norm, _ = asked
    fmt, weights, shape = Format.of(args), asked.expanded_weights(), pieces.shape[1:-2]
    working = torch.promote_types(pieces.dtype, torch.float32)
    by_piece = pieces.movedim(0, -3).reshape(shape.numel(), -1)
    if weights is not None:
        weights = weights.movedim(0, -3).reshape_as(by_piece)
    scale = scale.to(working).reshape(-1, 1)
    if args.symmetric:
        zero_point = None
    zero_point = None if zero_point is None else zero_point.to(working).reshape(-1, 1)
    errors = torch.zeros(len(by_piece), dtype=torch.float64, device=by_piece.device)
    for these in runs(len(by_piece), each=min(by_piece.shape[1], TILE)):
        zeros = None if zero_point is None else zero_point[these]
        for columns in runs(by_piece.shape[1]):
            x = by_piece[these, columns].to(working).nan_to_num(0.0, 0.0, 0.0)
            values = quantize_dequantize(x, scale[these], zeros, fmt)
            error = (values - x).abs_().double().pow_(norm)
            if weights is not None:
                error *= weights[these, columns]
            errors[these] += error.sum(-1)
    return errors.reshape(shape)
