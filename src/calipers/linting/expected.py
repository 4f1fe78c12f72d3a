"""Which tensors a quantized module has by its scheme, with their shapes and dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import DynamicType, QuantizationArgs

from calipers.kernels.packing import IN_BYTES, IN_PAIRS, IN_WORDS
from calipers.linting.modules import StoredModule
from calipers.numerics.formats import FP8_DTYPE
from calipers.numerics.layout import has_global_scale, shared_columns, strategy_name

SIDES = ("weight", "input", "output", "q", "k", "v")
PARAMETERS = frozenset(
    {f"{side}_{what}" for side in SIDES for what in ("scale", "zero_point", "global_scale")}
    | {"weight_packed", "weight_shape", "weight_g_idx"}
)
"""All names that the parameters of quantization have."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)
_MX = (CompressionFormat.mxfp4_pack_quantized, CompressionFormat.mxfp8_quantized)
_BY_ROW = ("group", "channel")


class Expected(NamedTuple):
    """A tensor that a module should have.

    :param role: codes, scale, global_scale, zero_point, shape or order
    :param shape: None where it cannot be told
    """

    local: str
    role: str
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...] | None = None
    required: bool = True
    side: str = "weight"


def expected_tensors(module: StoredModule) -> list[Expected]:
    """Return what a module should have besides its own tensors, by what the config says."""
    found: list[Expected] = []
    for side, args in module.sides:
        if side == "weight":
            found += _of_weight(module, args)
        else:
            found += _of_activation(module, side, args)
    return found


def _of_weight(module: StoredModule, args: QuantizationArgs) -> Iterator[Expected]:
    form, shape = module.form, module.shape
    name = "weight" if form in IN_BYTES else "weight_packed"
    yield Expected(name, "codes", code_dtypes(args, form), _shape_of_codes(args, form, shape))
    scales = None if shape is None else scale_shape(args, shape)
    yield Expected("weight_scale", "scale", _scale_dtypes(args, form), scales)
    if has_global_scale(args):
        yield Expected("weight_global_scale", "global_scale", FLOATS, (1,))
    if not args.symmetric:
        yield _zero_point(args, form, scales)
    if form in IN_WORDS:
        size = None if shape is None else (len(shape),)
        yield Expected("weight_shape", "shape", _WHOLE, size)
    columns = None if shape is None else (shape[-1],)
    yield Expected("weight_g_idx", "order", _WHOLE, columns, required=False)


def code_dtypes(args: QuantizationArgs, form: CompressionFormat | None) -> tuple[torch.dtype, ...]:
    """Return the dtype of the tensor of codes."""
    if form in IN_WORDS:
        return (torch.int32,)
    if form in IN_PAIRS:
        return (torch.uint8,)
    return (FP8_DTYPE,) if args.type == "float" else (torch.int8,)


def _shape_of_codes(
    args: QuantizationArgs, form: CompressionFormat | None, shape: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    if shape is None:
        return None
    *rows, columns = shape
    if form in IN_WORDS:
        return (*rows, -(-columns * args.num_bits // 32))
    return (*rows, -(-columns // 2)) if form in IN_PAIRS else shape


def _scale_dtypes(
    args: QuantizationArgs, form: CompressionFormat | None
) -> tuple[torch.dtype, ...]:
    if form is CompressionFormat.nvfp4_pack_quantized:
        return (args.scale_dtype or FP8_DTYPE,)
    return (args.scale_dtype or torch.uint8,) if form in _MX else FLOATS


def scale_shape(args: QuantizationArgs, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape of the scales of a weight."""
    *rows, columns = shape
    strategy, width = strategy_name(args), shared_columns(args) or columns
    if strategy == "tensor":
        return (1,)
    if strategy == "block" and args.block_structure:
        rows[-1] = -(-rows[-1] // args.block_structure[0])
    elif strategy == "channel":
        width = columns
    elif strategy not in ("group", "tensor_group"):
        return None
    return (*rows, -(-columns // width))


def _zero_point(
    args: QuantizationArgs, form: CompressionFormat | None, scales: tuple[int, ...] | None
) -> Expected:
    name = "weight_zero_point"
    if form in IN_WORDS and strategy_name(args) in _BY_ROW:
        if scales is not None:
            *lead, rows, groups = scales
            scales = (*lead, -(-rows * args.num_bits // 32), groups)
        return Expected(name, "zero_point", (torch.int32,), scales)
    return Expected(name, "zero_point", (*_WHOLE, FP8_DTYPE, *FLOATS), scales)


def _of_activation(module: StoredModule, side: str, args: QuantizationArgs) -> Iterator[Expected]:
    """Give the parameters of static activations and states; dynamic ones have none on disk."""
    if args.dynamic is True:
        return
    if has_global_scale(args):
        yield Expected(f"{side}_global_scale", "global_scale", FLOATS, (1,), side=side)
    if args.dynamic == DynamicType.LOCAL:
        return
    shape = (1,) if strategy_name(args) == "tensor" else None
    if strategy_name(args) == "group" and module.shape is not None and side == "input":
        shape = (-(-module.shape[-1] // args.group_size),)
    yield Expected(f"{side}_scale", "scale", FLOATS, shape, side=side)
    if not args.symmetric:
        dtypes = (*_WHOLE, FP8_DTYPE, *FLOATS)
        yield Expected(f"{side}_zero_point", "zero_point", dtypes, shape, side=side)
