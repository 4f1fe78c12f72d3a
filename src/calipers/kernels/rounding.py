"""Rounding to the numbers of a format: values and their errors, and codes as checkpoints hold them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize as to_codes
from torch import Tensor

from calipers.kernels.operations import Workload, operation
from calipers.kernels.resources import TILE, runs
from calipers.numerics.formats import Format
from calipers.numerics.layout import indivisible_by, shared_columns, strategy_name
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
_PART = 1 << 19  # values that torch packs at a time


class Packing(NamedTuple):
    """What is packed, by what, and how; a global scale is already divided out."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    args: QuantizationArgs
    form: CompressionFormat


@torch.no_grad()
def pack_weight(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    args: QuantizationArgs,
    form: CompressionFormat,
) -> Tensor:
    """Quantize a matrix and pack its codes, bit by bit as compressed-tensors does.

    The result is what its compressor for ``form``, one of those listed here, makes of the weight:
    int32, uint8, int8 or float8, (rows, …). It computes in the dtype of its tensors, and so does
    this. Global scales are those of fp4; with other codes compressed-tensors leaves them alone.

    >>> args = QuantizationArgs(num_bits=4, strategy="channel")
    >>> row = torch.tensor([[1.0, -2.0, 3.4, 0.5]])
    >>> form = CompressionFormat.pack_quantized
    >>> hex(pack_weight(row, torch.tensor([[1.0]]), None, None, args, form))
    '0x8b69'
    """
    if global_scale is not None and form in IN_PAIRS:
        scale = scale / global_scale
    asked = Packing(weight, scale, zero_point, args, form)
    shared = _shared(asked)
    return _pack_in_torch(asked) if shared is None else pack(asked, shared)


def _shared(asked: Packing) -> tuple[int, int] | None:
    """Return how many rows and columns share a scale; None where scales have another shape."""
    weight, scale, zero_point, args = asked[:4]
    if weight.dim() != 2 or not weight.numel() or not scale.dim():
        return None
    rows, columns = weight.shape
    strategy = strategy_name(args)
    if strategy == "block":
        height, width = args.block_structure
    elif strategy in ("tensor", "channel", "group", "tensor_group"):
        height, width = rows if strategy == "tensor" else 1, shared_columns(args) or columns
        if indivisible_by(columns, args):
            return None
    else:
        return None
    expected = (1,) if strategy == "tensor" else (-(-rows // height), -(-columns // width))
    parts = [scale] if zero_point is None else [scale, zero_point]
    return (height, width) if all(part.shape == expected for part in parts) else None


@operation(lambda asked, *_: Workload((asked.weight,)))
def pack(asked: Packing, shared: tuple[int, int]) -> Tensor:
    """Pack a matrix whose blocks of so many rows and columns share a scale.

    Some rows at a time: this takes many times the memory of what is packed.
    """
    return torch.cat([_pack_in_torch(part) for part in _parts(asked, shared[0])])


def _parts(asked: Packing, height: int) -> Iterator[Packing]:
    rows, columns = asked.weight.shape
    for blocks in runs(math.ceil(rows / height), each=height * columns, tile=_PART):
        scale, zero_point = (
            None if part is None else part[blocks] for part in (asked.scale, asked.zero_point)
        )
        assert scale is not None
        weight = asked.weight[blocks.start * height : blocks.stop * height]
        yield asked._replace(weight=weight, scale=scale, zero_point=zero_point)


def _pack_in_torch(asked: Packing) -> Tensor:
    *given, args, form = asked
    packed: Tensor
    if form in IN_WORDS:
        packed = pack_to_int32(to_codes(*given, args, torch.int8), args.num_bits)
    elif form in IN_PAIRS:
        packed = pack_fp4_to_uint8(to_codes(*given, args))
    else:
        packed = to_codes(*given, args, args.pytorch_dtype())
    return packed


class Quantization(NamedTuple):
    """What is quantized, by what, and how its error counts; weights have the shape of pieces.

    :param working: what quotients are rounded to before they are rounded to the grid
    """

    pieces: Tensor
    scale: Tensor
    zero_point: Tensor | None
    fmt: Format
    norm: float
    weights: Tensor | None = None
    working: torch.dtype = torch.float32


@torch.no_grad()
def quantize_with_error(
    pieces: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    args: QuantizationArgs,
    norm: float = 2.0,
    *,
    working: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Quantize and dequantize pieces, (observations, *qparam_shape, rows, columns).

    Returns the values in the shape and dtype of ``pieces``, and Σ|q−x|^norm of each piece in
    float64. ``scale`` and ``zero_point`` have the qparam shape; a global scale is already divided
    out. The work is done in float32 (float64 for float64). NaN and Inf stay and add no error.
    No gradient runs through this.

    :param working: what quotients are rounded to first, as when a checkpoint is written in it:
        bfloat16 or float16; what has more digits than they need changes nothing

    >>> args = QuantizationArgs(num_bits=4)
    >>> x = torch.tensor([[[[1.0, 2.2, -3.5]]]])
    >>> quantize_with_error(x, torch.tensor([0.5]), None, args)
    (tensor([[[[ 1.0000, 2.0000, -3.5000]]]]), tensor([0.0400], dtype=torch.float64))
    """
    return quantize(_quantization(pieces, scale, zero_point, args, norm, working=working))


@torch.no_grad()
def quantization_errors(
    pieces: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    args: QuantizationArgs,
    norm: float = 2.0,
    weights: Tensor | None = None,
    *,
    working: torch.dtype = torch.float32,
) -> Tensor:
    """Return Σ w·|q−x|^norm of each piece alone; ``weights`` broadcasts with the pieces.

    >>> args = QuantizationArgs(num_bits=4)
    >>> x = torch.tensor([[[[1.0, 2.2, -3.5]]]])
    >>> quantization_errors(x, torch.tensor([0.5]), None, args, weights=torch.tensor(2.0))
    tensor([0.0800], dtype=torch.float64)
    """
    return sum_errors(_quantization(pieces, scale, zero_point, args, norm, weights, working))


def _quantization(
    pieces: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    args: QuantizationArgs,
    norm: float,
    weights: Tensor | None = None,
    working: torch.dtype = torch.float32,
) -> Quantization:
    if weights is not None:
        weights = weights.to(pieces.device, torch.promote_types(pieces.dtype, torch.float32))
        weights = weights.expand(pieces.shape)
    zero_point = None if args.symmetric else zero_point
    return Quantization(pieces, scale, zero_point, Format.of(args), norm, weights, working)


def _workload(asked: Quantization) -> Workload:
    return Workload((asked.pieces,), asked.fmt, asked.norm)


@operation(_workload)
def quantize(asked: Quantization) -> tuple[Tensor, Tensor]:
    """Return quantized values, NaN and Inf as they are, and the error of each piece."""
    values, errors = _quantize_in_torch(asked)
    pieces = asked.pieces
    return torch.where(torch.isfinite(pieces), values.to(pieces.dtype), pieces), errors


def _quantize_in_torch(asked: Quantization) -> tuple[Tensor, Tensor]:
    """Return quantized values in the working precision, NaN and Inf as zero, and the errors."""
    working = torch.promote_types(asked.pieces.dtype, torch.float32)
    x = asked.pieces.to(working).nan_to_num(0.0, 0.0, 0.0)
    scale, zero_point = (
        None if part is None else part.to(working)[..., None, None]
        for part in (asked.scale, asked.zero_point)
    )
    assert scale is not None
    values = quantize_dequantize(x, scale, zero_point, asked.fmt, asked.working)
    error = (values - x).abs_().double().pow_(asked.norm)
    if asked.weights is not None:
        error *= asked.weights
    return values, error.sum((0, -2, -1))


@operation(_workload)
def sum_errors(asked: Quantization) -> Tensor:
    """Return the error of each piece. Work tile by tile: the values themselves are not kept."""
    shape = asked.pieces.shape[1:-2]
    by_piece = asked.pieces.movedim(0, -3).reshape(shape.numel(), -1)
    errors = torch.zeros(len(by_piece), dtype=torch.float64, device=by_piece.device)
    length = by_piece.shape[1]
    flat = asked._replace(
        pieces=by_piece,
        scale=asked.scale.reshape(-1),
        zero_point=None if asked.zero_point is None else asked.zero_point.reshape(-1),
        weights=None
        if asked.weights is None
        else asked.weights.movedim(0, -3).reshape_as(by_piece),
    )
    for these in runs(len(by_piece), each=min(length, TILE)):
        for columns in runs(length):
            errors[these] += _quantize_in_torch(_part(flat, these, columns))[1]
    return errors.reshape(shape)


def _part(flat: Quantization, these: slice, columns: slice) -> Quantization:
    """Return some columns of some pieces, which come as the rows of a matrix."""
    zero_point, weights = flat.zero_point, flat.weights
    return flat._replace(
        pieces=flat.pieces[these, columns][None, :, None],
        scale=flat.scale[these],
        zero_point=None if zero_point is None else zero_point[these],
        weights=None if weights is None else weights[these, columns][None, :, None],
    )
