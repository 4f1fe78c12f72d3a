"""The codes of a weight as checkpoints hold them: quantized and packed in one pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from torch import Tensor

from calipers.kernels.operations import Workload, operation
from calipers.kernels.tiles import runs
from calipers.numerics.layout import indivisible_by, shared_columns, strategy_name

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
    return _in_torch(asked) if shared is None else pack(asked, shared)


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
    return torch.cat([_in_torch(part) for part in _parts(asked, shared[0])])


def _parts(asked: Packing, height: int) -> Iterator[Packing]:
    rows, columns = asked.weight.shape
    for blocks in runs(math.ceil(rows / height), each=height * columns, tile=_PART):
        scale, zero_point = (
            None if part is None else part[blocks] for part in (asked.scale, asked.zero_point)
        )
        assert scale is not None
        weight = asked.weight[blocks.start * height : blocks.stop * height]
        yield asked._replace(weight=weight, scale=scale, zero_point=zero_point)


def _in_torch(asked: Packing) -> Tensor:
    *given, args, form = asked
    packed: Tensor
    if form in IN_WORDS:
        packed = pack_to_int32(quantize(*given, args, torch.int8), args.num_bits)
    elif form in IN_PAIRS:
        packed = pack_fp4_to_uint8(quantize(*given, args))
    else:
        packed = quantize(*given, args, args.pytorch_dtype())
    return packed
