"""The weights that the tensors of a checkpoint stand for, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import Tensor

from calipers.checkpoint.stored_module import IN_MX, StoredModule
from calipers.kernels.rounding import IN_PAIRS, IN_WORDS
from calipers.kernels.tiles import runs
from calipers.numerics.layout import strategy_name

_TILE = 1 << 20
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class QuantizedWeight:
    """The tensors of a quantized weight; scales and zero points are numbers already.

    :param order: the group of each column, where it is not given by its place
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    global_scale: Tensor | None
    order: Tensor | None
    args: QuantizationArgs
    form: CompressionFormat
    shape: tuple[int, ...]

    @classmethod
    def of(cls, module: StoredModule) -> QuantizedWeight:
        """Open the tensors of a module, which must fit its scheme."""
        args, form, shape, codes = module.weights, module.form, module.shape, module.codes
        assert args is not None
        assert form is not None
        assert shape is not None
        assert codes is not None
        found = {local: each.map() for local, each in module.tensors.items()}
        scale, zero_point = found["weight_scale"], found.get("weight_zero_point")
        if form in IN_MX:
            scale = decompress_mx_scale(scale)
        if args.symmetric:
            zero_point = None
        elif zero_point is not None and zero_point.dtype == torch.int32 and form in IN_WORDS:
            size = torch.Size((shape[0], scale.shape[-1]))
            zero_point = unpack_from_int32(zero_point, args.num_bits, size, packed_dim=0)
        return cls(
            codes.map(),
            scale.float(),
            zero_point,
            found.get("weight_global_scale"),
            found.get("weight_g_idx"),
            args,
            form,
            shape,
        )

    def rows(self, rows: slice) -> Tensor:
        """Return some rows of the weight in float32: what codes and scales stand for.

        compressed-tensors computes the same in the dtype of the scales, which rounds the values.
        """
        values = self._unpacked(self.codes[rows])
        scale, zero_point = (self._of_rows(each, rows) for each in (self.scale, self.zero_point))
        assert scale is not None
        if self.order is not None:
            return _by_order(values, scale, zero_point, self.order)
        found: Tensor = dequantize(
            values,
            scale,
            zero_point,
            self.args,
            dtype=torch.float32,
            global_scale=self.global_scale,
        )
        return found

    def tiles(self) -> Iterator[slice]:
        """Cut the rows into parts that do not cut through blocks."""
        rows, columns = self.shape
        height = self.args.block_structure[0] if self.args.block_structure else 1
        for part in runs(-(-rows // height), each=height * columns, tile=_TILE):
            yield slice(part.start * height, min(part.stop * height, rows))

    def scales(self) -> Tensor:
        """Return what codes are multiplied by, in float32."""
        scale, whole = self.scale.float(), self.global_scale
        return scale if whole is None else scale / whole.float()

    def _of_rows(self, value: Tensor | None, rows: slice) -> Tensor | None:
        strategy = strategy_name(self.args)
        if value is None or strategy == "tensor":
            return value
        if strategy == "block":
            height = self.args.block_structure[0]
            return value[rows.start // height : -(-rows.stop // height)]
        return value[rows]

    def _unpacked(self, codes: Tensor) -> Tensor:
        """Return codes as numbers, each in a place of its own."""
        if self.form in IN_PAIRS:
            return _by_bytes(codes, _fp4_pairs())[:, : self.shape[-1]]
        if self.form not in IN_WORDS:
            return codes
        if self.args.num_bits == 4:
            return _by_bytes(codes.contiguous(), _int4_pairs())[:, : self.shape[-1]]
        size = torch.Size((len(codes), self.shape[-1]))
        unpacked: Tensor = unpack_from_int32(codes.contiguous(), self.args.num_bits, size)
        return unpacked


def _by_order(values: Tensor, scale: Tensor, zero_point: Tensor | None, order: Tensor) -> Tensor:
    """Dequantize columns whose groups are given one by one."""
    groups = order.long().clamp(0, scale.shape[-1] - 1)
    found = values.to(scale.dtype)
    if zero_point is not None:
        found = found - zero_point.to(scale.dtype)[:, groups]
    return found * scale[:, groups]


def _by_bytes(codes: Tensor, pairs: Tensor) -> Tensor:
    """Look up the two numbers that each byte stands for."""
    found = pairs[codes.view(torch.uint8).int()]
    return found.view(torch.bfloat16 if pairs.dtype == torch.int32 else torch.int8)


@cache
def _fp4_pairs() -> Tensor:
    """Return, for each byte, two numbers in bfloat16 as one of 32 bits."""
    values = torch.tensor([*_FP4, *(-each for each in _FP4)], dtype=torch.bfloat16)
    byte = torch.arange(256)
    return torch.stack([values[byte & 15], values[byte >> 4]], 1).view(torch.int32).flatten()


@cache
def _int4_pairs() -> Tensor:
    """Return, for each byte, two numbers in int8 as one of 16 bits."""
    byte = torch.arange(256)
    pair = torch.stack([(byte & 15) - 8, (byte >> 4) - 8], 1).to(torch.int8)
    return pair.view(torch.int16).flatten()
