"""Modules in the files of a quantized checkpoint: their tensors, their defects, their weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Literal, NamedTuple

import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import DynamicType, QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from torch import Tensor

from calipers.files.safetensors_header import StoredTensor
from calipers.kernels.rounding import IN_BYTES, IN_PAIRS, IN_WORDS
from calipers.numerics.formats import FP8_DTYPE
from calipers.numerics.layout import (
    has_global_scale,
    indivisible_by,
    row_tiles,
    scale_rows,
    scale_shape,
    strategy_name,
)

IN_MX = frozenset({CompressionFormat.mxfp4_pack_quantized, CompressionFormat.mxfp8_quantized})
"""Formats whose scales are powers of two, stored as exponents."""
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SIDES = ("weight", "input", "output", "q", "k", "v")
PARAMETERS = frozenset(
    {f"{side}_{what}" for side in SIDES for what in ("scale", "zero_point", "global_scale")}
    | {"weight_packed", "weight_shape", "weight_g_idx"}
)
"""All names that the parameters of quantization have."""

_SCHEME_KEYS = {"weight": "weights", "input": "input_activations", "output": "output_activations"}
_QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)
_LARGEST_SHAPE = 1024
"""More bytes than the shape of any weight takes."""

_TILE = 1 << 20
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class ExpectedTensor(NamedTuple):
    """A tensor that a module should have by its scheme.

    :param shape: None where it cannot be told
    """

    local: str
    role: Literal["codes", "scale", "global_scale", "zero_point", "shape", "order"]
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...] | None = None
    required: bool = True
    side: str = "weight"


class TensorDefect(NamedTuple):
    """A tensor that a module should have, and does not have, or not in this dtype or shape."""

    kind: Literal["missing", "dtype", "shape"]
    expected: ExpectedTensor


@dataclass(frozen=True)
class StoredModule:
    """A module in the files of a checkpoint.

    :param tensors: by their names in the module
    :param scheme: what the config says of it; None where it is to stay as it is
    :param form: in which format its weight is compressed
    :param states: how the states of attention are quantized, by q, k and v
    :param model_shape: that of its weight, where the model is known
    :param elsewhere: parameters of keys and values that older writers stored with projections:
        those that attention need not have, or those that a projection has for it
    """

    name: str
    tensors: Mapping[str, StoredTensor]
    scheme: QuantizationScheme | None = None
    form: CompressionFormat | None = None
    states: Mapping[str, QuantizationArgs] = field(default_factory=dict)
    model_shape: tuple[int, ...] | None = None
    elsewhere: frozenset[str] = frozenset()

    @property
    def weights(self) -> QuantizationArgs | None:
        """How its weight is quantized."""
        return None if self.scheme is None else self.scheme.weights

    @property
    def sides(self) -> Iterator[tuple[str, QuantizationArgs]]:
        """What is quantized of it, by the prefixes of its parameters."""
        for side, key in _SCHEME_KEYS.items():
            args = getattr(self.scheme, key, None)
            if args is not None and not self.states:
                yield side, args
        yield from self.states.items()

    @property
    def size(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.size for tensor in self.tensors.values())

    def read(self, local: str) -> Tensor | None:
        """Read one of its tensors; None if it has none of that name."""
        stored = self.tensors.get(local)
        return None if stored is None else stored.read()

    @property
    def stores_codes(self) -> bool:
        """Whether there are codes instead of a weight."""
        weight = self.tensors.get("weight")
        is_code = weight is not None and weight.dtype in _QUANTIZED_DTYPES
        return is_code or "weight_packed" in self.tensors

    @property
    def is_unquantized(self) -> bool:
        """Whether its weight should be quantized by the config, and is not."""
        plain = "weight" in self.tensors and not self.stores_codes
        return self.weights is not None and plain and "weight_scale" not in self.tensors

    @property
    def codes(self) -> StoredTensor | None:
        """The tensor of its codes, by the name that the format has for it."""
        local = "weight" if self.form in IN_BYTES else "weight_packed"
        return self.tensors.get(local) if self.stores_codes else None

    @cached_property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of its quantized weight: as the model has it, or as files tell."""
        codes = self.codes
        if self.model_shape or codes is None or self.weights is None or len(codes.shape) < 2:
            return self.model_shape or None
        *rows, width = codes.shape
        if self.form in IN_BYTES:
            return codes.shape
        if codes.dtype == torch.uint8:
            return (*rows, 2 * width)
        return self.noted_shape or (*rows, width * 32 // self.weights.num_bits)

    @property
    def weight_shape(self) -> tuple[int, ...] | None:
        """The shape of its weight, quantized or not; None if that cannot be told."""
        weight = self.tensors.get("weight")
        return self.shape or (None if weight is None else weight.shape)

    @cached_property
    def noted_shape(self) -> tuple[int, ...] | None:
        """What ``weight_shape`` holds; None where that is not the shape of a weight."""
        stored = self.tensors.get("weight_shape")
        if stored is None or stored.dtype.is_floating_point or stored.size > _LARGEST_SHAPE:
            return None
        shape = tuple(int(size) for size in stored.read().flatten().tolist())
        return shape if len(shape) >= 2 and min(shape) > 0 else None

    @property
    def contradicts_noted_shape(self) -> bool:
        """Whether ``weight_shape`` is there, and does not hold the shape of the weight."""
        if self.form not in IN_WORDS or "weight_shape" not in self.tensors:
            return False
        return self.noted_shape is None or self.model_shape not in (None, self.noted_shape)

    @property
    def indivisible_by(self) -> int | None:
        """The size of groups that do not fill a row; blocks may reach beyond it."""
        args, shape = self.weights, self.shape
        if args is None or shape is None or strategy_name(args) not in ("group", "tensor_group"):
            return None
        return indivisible_by(shape[-1], args)

    @cached_property
    def expected(self) -> tuple[ExpectedTensor, ...]:
        """What it should have besides its own tensors, by what the config says."""
        expected: list[ExpectedTensor] = []
        for side, args in self.sides:
            if side == "weight":
                expected += _expected_of_weight(args, self.form, self.shape)
            else:
                expected += _expected_of_activation(self, side, args)
        return tuple(expected)

    @cached_property
    def defects(self) -> tuple[TensorDefect, ...]:
        """Those tensors that it should have, and has not, or in another dtype or shape."""
        defects: list[TensorDefect] = []
        for expected in () if self.is_unquantized else self.expected:
            stored, shape = self.tensors.get(expected.local), expected.shape
            if stored is None:
                if expected.required and expected.local not in self.elsewhere:
                    defects.append(TensorDefect("missing", expected))
            elif stored.dtype not in expected.dtypes:
                defects.append(TensorDefect("dtype", expected))
            elif shape is not None and stored.shape != shape:
                is_one_number = math.prod(stored.shape) == math.prod(shape) == 1
                if not is_one_number:  # which may have any number of dimensions
                    defects.append(TensorDefect("shape", expected))
        return tuple(defects)

    @property
    def is_sound(self) -> bool:
        """Whether the tensors of a quantized weight are there, and fit each other."""
        if self.weights is None or self.is_unquantized or self.contradicts_noted_shape:
            return False
        if self.indivisible_by is not None:
            return False
        if any(defect.expected.side == "weight" for defect in self.defects):
            return False
        return all(
            expected.shape is not None
            for expected in self.expected
            if expected.side == "weight" and expected.local in self.tensors
        )

    def open_weight(self) -> QuantizedWeight | None:
        """Open the tensors of its quantized weight; None if they are not there, or do not fit."""
        return QuantizedWeight.of(self) if self.is_sound else None


def _expected_of_weight(
    args: QuantizationArgs, form: CompressionFormat | None, shape: tuple[int, ...] | None
) -> Iterator[ExpectedTensor]:
    *rows, columns = shape or (0,)
    dtype, width = FP8_DTYPE if args.type == "float" else torch.int8, columns
    scale_dtypes: tuple[torch.dtype, ...] = FLOATS
    if form in IN_WORDS:
        dtype, width = torch.int32, -(-columns * args.num_bits // 32)
    elif form in IN_PAIRS:
        dtype, width = torch.uint8, -(-columns // 2)
    if form is CompressionFormat.nvfp4_pack_quantized:
        scale_dtypes = (args.scale_dtype or FP8_DTYPE,)
    elif form in IN_MX:
        scale_dtypes = (args.scale_dtype or torch.uint8,)
    scales = None if shape is None else scale_shape(shape, args)

    name = "weight" if form in IN_BYTES else "weight_packed"
    yield ExpectedTensor(name, "codes", (dtype,), None if shape is None else (*rows, width))
    yield ExpectedTensor("weight_scale", "scale", scale_dtypes, scales)
    if has_global_scale(args):
        yield ExpectedTensor("weight_global_scale", "global_scale", FLOATS, (1,))
    if not args.symmetric:
        dtypes: tuple[torch.dtype, ...] = (*_WHOLE, FP8_DTYPE, *FLOATS)
        if form in IN_WORDS and strategy_name(args) in ("group", "channel"):
            dtypes = (torch.int32,)
            if scales is not None:  # packed along the rows
                *lead, count, groups = scales
                scales = (*lead, -(-count * args.num_bits // 32), groups)
        yield ExpectedTensor("weight_zero_point", "zero_point", dtypes, scales)
    if form in IN_WORDS:
        size = None if shape is None else (len(shape),)
        yield ExpectedTensor("weight_shape", "shape", _WHOLE, size)
    order = None if shape is None else (columns,)
    yield ExpectedTensor("weight_g_idx", "order", _WHOLE, order, required=False)


def _expected_of_activation(
    module: StoredModule, side: str, args: QuantizationArgs
) -> Iterator[ExpectedTensor]:
    """Give the parameters of static activations and states; dynamic ones have none on disk."""
    if args.dynamic is True:
        return
    if has_global_scale(args):
        yield ExpectedTensor(f"{side}_global_scale", "global_scale", FLOATS, (1,), side=side)
    if args.dynamic == DynamicType.LOCAL:
        return
    shape = (1,) if strategy_name(args) == "tensor" else None
    if strategy_name(args) == "group" and module.shape is not None and side == "input":
        shape = (-(-module.shape[-1] // args.group_size),)
    yield ExpectedTensor(f"{side}_scale", "scale", FLOATS, shape, side=side)
    if not args.symmetric:
        dtypes = (*_WHOLE, FP8_DTYPE, *FLOATS)
        yield ExpectedTensor(f"{side}_zero_point", "zero_point", dtypes, shape, side=side)


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
        tensors = {local: stored.map() for local, stored in module.tensors.items()}
        scale, zero_point = tensors["weight_scale"], tensors.get("weight_zero_point")
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
            tensors.get("weight_global_scale"),
            tensors.get("weight_g_idx"),
            args,
            form,
            shape,
        )

    def rows(self, rows: slice) -> Tensor:
        """Return some rows of the weight in float32: what codes and scales stand for.

        compressed-tensors computes the same in the dtype of the scales, which rounds the values.
        """
        values = self._unpacked(self.codes[rows])
        scale, zero_point = scale_rows(self.scale, rows, self.args), self.zero_point
        if zero_point is not None:
            zero_point = scale_rows(zero_point, rows, self.args)
        if self.order is not None:  # the group of each column is given
            groups = self.order.long().clamp(0, scale.shape[-1] - 1)
            numbers = values.to(scale.dtype)
            if zero_point is not None:
                numbers = numbers - zero_point.to(scale.dtype)[:, groups]
            return numbers * scale[:, groups]
        weight: Tensor = dequantize(
            values,
            scale,
            zero_point,
            self.args,
            dtype=torch.float32,
            global_scale=self.global_scale,
        )
        return weight

    def tiles(self) -> Iterator[slice]:
        """Cut the rows into parts that do not cut through blocks."""
        return row_tiles(self.shape, self.args, _TILE)

    def scales(self) -> Tensor:
        """Return what codes are multiplied by, in float32."""
        scale, whole = self.scale.float(), self.global_scale
        return scale if whole is None else scale / whole.float()

    def _unpacked(self, codes: Tensor) -> Tensor:
        """Return codes as numbers, each in a place of its own."""
        if self.form not in IN_PAIRS | IN_WORDS:
            return codes
        columns, codes = self.shape[-1], codes.contiguous()
        if self.args.num_bits != 4:
            size = torch.Size((len(codes), columns))
            unpacked: Tensor = unpack_from_int32(codes, self.args.num_bits, size)
            return unpacked
        is_fp4 = self.form in IN_PAIRS
        values = _values_of_bytes("fp4" if is_fp4 else "int4")
        pairs = values.flatten()[codes.view(torch.uint8).int()]
        return pairs.view(torch.bfloat16 if is_fp4 else torch.int8)[:, :columns]


@cache
def _values_of_bytes(kind: Literal["fp4", "int4"]) -> Tensor:
    """Return the two numbers that each byte stands for, as one number twice as long."""
    byte = torch.arange(256)
    if kind == "int4":
        codes = torch.stack([(byte & 15) - 8, (byte >> 4) - 8], 1).to(torch.int8)
        return codes.view(torch.int16)
    values = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=torch.bfloat16)
    return torch.stack([values[byte & 15], values[byte >> 4]], 1).view(torch.int32)
