"""How often each code of a weight occurs, counted on the packed bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from torch import Tensor

from calipers.checkpoint.stored_module import IN_MX
from calipers.kernels.reductions import count_values
from calipers.kernels.resources import runs
from calipers.kernels.rounding import IN_PAIRS, IN_WORDS
from calipers.numerics.formats import GRIDS, Grid
from calipers.numerics.layout import shared_columns, strategy_name

_TILE = 1 << 20
# The range, in standard deviations, that loses least of normal values, by bits.
_BEST_RANGE = {1: 0.8, 2: 1.5, 3: 2.0, 4: 2.5, 5: 2.9, 6: 3.3, 7: 3.6, 8: 3.9}


class CodeCounts(NamedTuple):
    """How the codes of a weight are used.

    :param used: how many different numbers occur
    :param available: how many there are
    :param saturated: the share of values at either end
    :param outside: codes that the number of bits does not have
    :param nan: codes that stand for NaN
    """

    total: int
    used: int
    available: int
    saturated: float
    outside: int = 0
    nan: int = 0


def grid_of(args: QuantizationArgs) -> Grid | None:
    """Return the numbers that codes stand for; None where Calipers does not know the format."""
    return GRIDS.get((QuantizationType(args.type).value, args.num_bits))


def byte_counts(values: Tensor) -> Tensor:
    """Count the bytes of a tensor, 256 counts; two bytes at a time.

    >>> byte_counts(torch.tensor([1, 255, 1], dtype=torch.uint8)).nonzero().flatten().tolist()
    [1, 255]
    """
    flat = values.reshape(-1).view(torch.uint8)
    even = flat[: flat.numel() // 2 * 2]
    if even.data_ptr() % 2:
        even = even.clone()
    counts = torch.zeros(256, dtype=torch.int64)
    if even.numel():
        counts += halved(count_values(even.view(torch.bfloat16).view(1, 1, 1, -1))[0])
    if flat.numel() % 2:
        counts[int(flat[-1])] += 1
    return counts


def halved(counts: Tensor) -> Tensor:
    """Turn counts of codes into those of their halves: of bytes into those of nibbles.

    >>> halved(torch.tensor([0, 0, 3, 0]))
    tensor([3, 3])
    """
    size = math.isqrt(len(counts))
    square = counts.view(size, size)
    return square.sum(0) + square.sum(1)


def count_codes(
    codes: Tensor, form: CompressionFormat, args: QuantizationArgs, shape: tuple[int, ...]
) -> CodeCounts:
    """Count the codes of a weight as they are stored.

    >>> args = QuantizationArgs(num_bits=4, strategy="channel")
    >>> packed = torch.tensor([[0x8B69]], dtype=torch.int32)
    >>> count_codes(packed, CompressionFormat.pack_quantized, args, (1, 4))
    CodeCounts(total=4, used=4, available=16, saturated=0.0, outside=0, nan=0)
    """
    if form in IN_WORDS:
        return _of_integers(_counts_of_words(codes, args.num_bits, shape[-1]))
    counts = byte_counts(codes)
    if form in IN_PAIRS:
        return _of_floats(halved(counts), nan=())
    if args.type == "float":
        return _of_floats(counts, nan=(0x7F, 0xFF))
    return _of_bytes(counts, args.num_bits)


def _of_integers(counts: Tensor, outside: int = 0) -> CodeCounts:
    total, used = int(counts.sum()), int(counts.count_nonzero())
    ends = int(counts[0] + counts[-1])
    return CodeCounts(total, used, len(counts), ends / max(total, 1), outside)


def _of_bytes(counts: Tensor, bits: int) -> CodeCounts:
    """Judge integers of fewer bits in bytes of their own."""
    by_value = counts.roll(128)  # −128 comes first
    half = 1 << (bits - 1)
    inside = by_value[128 - half : 128 + half]
    return _of_integers(inside, outside=int(by_value.sum() - inside.sum()))


def _of_floats(counts: Tensor, nan: tuple[int, ...]) -> CodeCounts:
    """Judge floats of a sign and a magnitude, of which the largest is the last that is no NaN."""
    half = len(counts) // 2
    top = half - 1 - bool(nan)
    merged = counts.clone()
    merged[0] += merged[half]  # both zeros are one number
    merged[half] = 0
    broken = sum(int(merged[code]) for code in nan)
    merged[list(nan)] = 0
    total = int(merged.sum())
    ends = int(merged[top] + merged[half + top])
    return CodeCounts(
        total,
        int(merged.count_nonzero()),
        len(counts) - 1 - len(nan),
        ends / max(total, 1),
        0,
        broken,
    )


def _counts_of_words(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Count codes that lie one behind the other in words; the last word of a row may have rest."""
    rows = packed.reshape(-1, packed.shape[-1])
    if bits not in (1, 2, 4, 8):
        return _counts_by_unpacking(rows, bits, columns)
    counts = byte_counts(rows)
    for _ in range(3 - bits.bit_length() + 1):
        counts = halved(counts)
    for place in range(columns * bits % 32, 32, bits) if columns * bits % 32 else ():
        rest = (rows[:, -1] >> place) & ((1 << bits) - 1)
        counts -= torch.bincount(rest.long(), minlength=1 << bits)
    return counts


def _counts_by_unpacking(rows: Tensor, bits: int, columns: int) -> Tensor:
    counts = torch.zeros(256, dtype=torch.int64)
    for part in runs(len(rows), each=columns, tile=_TILE):
        tile = rows[part]
        counts += byte_counts(unpack_from_int32(tile, bits, torch.Size((len(tile), columns))))
    half = 1 << (bits - 1)
    return counts.roll(128)[128 - half : 128 + half]


def usual_saturation(
    args: QuantizationArgs, form: CompressionFormat, shape: tuple[int, ...]
) -> float:
    """Return the share of codes at the ends that normal values have.

    Their range is that of their extrema or, where that is smaller, the one that loses the least.
    """
    *rows, columns = shape
    width = shared_columns(args) or columns
    height = math.prod(rows) if strategy_name(args) == "tensor" else 1
    height = args.block_structure[0] if args.block_structure else height
    count = max(2, height * width)
    quantile = torch.tensor((1 + 0.5 ** (1 / count)) / 2, dtype=torch.float64)
    largest = min(float(torch.special.ndtri(quantile)), _BEST_RANGE.get(args.num_bits, 4.0))
    grid = grid_of(args)
    assert grid is not None
    low, high = grid.limits
    values = grid.values()
    scale = 2 * largest / (high - low) * (0.75 if form in IN_MX else 1)
    ends = (float(values[-1] + values[-2]) / 2, -float(values[0] + values[1]) / 2)
    shares = torch.special.ndtr(-torch.tensor(ends, dtype=torch.float64) * scale)
    return max(float(shares.sum()), 1 / count)
