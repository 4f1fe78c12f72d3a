"""Whether a quantized weight uses its codes well, and what has become of the original."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationType
from torch import Tensor

from calipers.checkpoint.stored_module import IN_MX, QuantizedWeight, StoredModule
from calipers.checkpoint.stored_weights import OriginalModel
from calipers.judging.costs import Streams, WeightLoss, stored_weight_loss, weight_loss
from calipers.kernels.reductions import count_values, extrema
from calipers.kernels.resources import runs
from calipers.kernels.rounding import IN_PAIRS, IN_WORDS
from calipers.linting.check import Check, Finding
from calipers.numerics.formats import GRIDS, Grid
from calipers.numerics.layout import (
    Layout,
    granularity_name,
    has_global_scale,
    shared_columns,
    strategy_name,
)
from calipers.numerics.qparams import safe_qparams
from calipers.observers import QParamsDict

_AGAIN = "Quantize this module again; look at its weight and at the data of the calibration."
_LEAST_SATURATED = 0.02
_ODDS = 8.0
"""So many times the usual odds of a code at the ends are suspicious."""
_VALUES_PER_CODE = 8
_TIMES = 3.0
"""So many times the error of scales from extrema is far too much."""
_ROUNDINGS = 2.0**-8
"""What storing weights and scales in 16 bits may add to an error."""
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


@dataclass(frozen=True)
class LintedWeight:
    """A quantized weight whose tensors are there and fit each other.

    :param counts: None where Calipers does not know the format
    :param error: ‖Q(W) − W‖ / ‖W‖; None where there is no original to compare it with
    :param usual_error: the same for scales from the extrema of the original
    """

    name: str
    args: QuantizationArgs = field(hash=False)  # which has none
    form: CompressionFormat
    shape: tuple[int, ...]
    counts: CodeCounts | None = None
    error: float | None = None
    usual_error: float | None = None

    @classmethod
    def of(cls, name: str, weight: QuantizedWeight, original: OriginalModel | None) -> LintedWeight:
        """Count the codes of a weight, and compare it with the original."""
        args, form, shape = weight.args, weight.form, weight.shape
        if grid_of(args) is None:
            return cls(name, args, form, shape)
        counts = count_codes(weight.codes, form, args, shape)
        errors = None if original is None else compare(name, weight, original)
        return cls(name, args, form, shape, counts, *(errors or ()))

    @property
    def scheme(self) -> str:
        """Its format and granularity, such as ``int4 group 128``."""
        kind = QuantizationType(self.args.type).value
        return f"{kind}{self.args.num_bits} {granularity_name(self.args)}"

    @property
    def codes_used(self) -> int | None:
        """How many of the codes occur."""
        return None if self.counts is None else self.counts.used

    @property
    def codes(self) -> int | None:
        """How many different numbers there are codes for."""
        return None if self.counts is None else self.counts.available

    @property
    def saturated(self) -> float | None:
        """The share of weights that have the lowest or the highest code."""
        return None if self.counts is None else self.counts.saturated

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        figures = ("codes_used", "codes", "saturated", "error", "usual_error")
        return {
            "name": self.name,
            "scheme": self.scheme,
            "shape": list(self.shape),
            **{figure: getattr(self, figure) for figure in figures},
        }


class CodesCheck(Check):
    """Look for weights that use their codes badly, or have lost far more than usual."""

    def of_weight(self, weight: LintedWeight) -> Iterator[Finding]:
        """Check a quantized weight whose tensors are there and fit each other."""
        name, counts = weight.name, weight.counts
        if counts is None:
            return
        if counts.outside:
            problem = f"has {counts.outside:,} codes that {weight.args.num_bits} bits do not have"
            hint = "Correct num_bits of the config, or quantize the module again."
            yield Finding("error", "code-range", name, problem, hint)
        if counts.nan:
            problem = f"has {counts.nan:,} codes that are NaN"
            yield Finding("error", "code-nan", name, problem, _AGAIN)
        usual = usual_saturation(weight.args, weight.form, weight.shape)
        odds = _ODDS * usual / (1 - usual)
        if counts.saturated > max(_LEAST_SATURATED, odds / (1 + odds)):
            problem = (
                f"has {counts.saturated:.1%} of its values at the lowest or highest code, where "
                f"normal values would have about {usual:.1%}"
            )
            hint = "Its scales are too small, or belong to another weight: quantize it again."
            yield Finding("warning", "codes-saturated", name, problem, hint)
        many = counts.total >= _VALUES_PER_CODE * counts.available
        if many and counts.used <= max(1, counts.available // 4):
            problem = f"uses {counts.used} of {counts.available} codes"
            hint = "Its scales are too large, or its values are all alike: look at the weight."
            yield Finding("warning", "codes-unused", name, problem, hint)
        if weight.error is None or weight.usual_error is None:
            return
        if weight.error > _TIMES * weight.usual_error + _ROUNDINGS:
            problem = (
                f"differs from the original by {weight.error:.1%} of its norm; scales from its "
                f"extrema would give {weight.usual_error:.1%}"
            )
            hint = (
                "Its codes or scales are damaged or belong to another weight, unless its values "
                "were changed on purpose before (smoothing, rotations, training)."
            )
            yield Finding("error", "error-high", name, problem, hint)


# Errors


def grid_of(args: QuantizationArgs) -> Grid | None:
    """Return the numbers that codes stand for; None where Calipers does not know the format."""
    return GRIDS.get((QuantizationType(args.type).value, args.num_bits))


def stored_loss(
    module: StoredModule, original: Tensor, streams: Streams | None = None
) -> WeightLoss | None:
    """Compare the weight of a module with the one it was made from; None where that cannot be."""
    if module.weights is None:  # only its input is quantized
        kept = module.read("weight")
        if kept is None or kept.shape != original.shape:
            return None
        return stored_weight_loss([(original, kept)], original, streams)
    weight = module.open_weight()
    return None if weight is None else _stored_loss(weight, original, streams)


def _stored_loss(
    weight: QuantizedWeight, original: Tensor, streams: Streams | None = None
) -> WeightLoss | None:
    if grid_of(weight.args) is None or original.shape != weight.shape or original.ndim != 2:
        return None
    pairs = ((original[rows], weight.rows(rows)) for rows in weight.tiles())
    return stored_weight_loss(pairs, original, streams)


def compare(name: str, weight: QuantizedWeight, model: OriginalModel) -> tuple[float, float] | None:
    """Return the error of a weight as it is stored, and with scales from its extrema, if known."""
    stored, args, global_scale = model.weight(name), weight.args, weight.global_scale
    if stored is None or stored.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return None
    original = stored.map()
    loss = _stored_loss(weight, original)
    if loss is None:
        return None
    ends = extrema(Layout.of("weight", args).pieces(original))
    scale, zero_point = safe_qparams(ends.min_vals, ends.max_vals, args, global_scale)
    qparams: QParamsDict = {
        "scale": scale,
        "zero_point": zero_point,
        "global_scale": global_scale if has_global_scale(args) else None,
    }
    return loss.error, weight_loss(original, args, qparams)[0].error


# Codes


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
    counts = _byte_counts(codes)
    if form in IN_PAIRS:
        return _of_floats(_halved(counts), nan=())
    if args.type == "float":
        return _of_floats(counts, nan=(0x7F, 0xFF))
    by_value = counts.roll(128)  # −128 comes first
    half = 1 << (args.num_bits - 1)  # integers of fewer bits may be in bytes of their own
    inside = by_value[128 - half : 128 + half]
    return _of_integers(inside, outside=int(by_value.sum() - inside.sum()))


def _of_integers(counts: Tensor, outside: int = 0) -> CodeCounts:
    total, used = int(counts.sum()), int(counts.count_nonzero())
    ends = int(counts[0] + counts[-1])
    return CodeCounts(total, used, len(counts), ends / max(total, 1), outside)


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
        counts = torch.zeros(256, dtype=torch.int64)
        for part in runs(len(rows), each=columns, tile=_TILE):
            tile = rows[part]
            counts += _byte_counts(unpack_from_int32(tile, bits, torch.Size((len(tile), columns))))
        half = 1 << (bits - 1)
        return counts.roll(128)[128 - half : 128 + half]
    counts = _byte_counts(rows)
    for _ in range(3 - bits.bit_length() + 1):
        counts = _halved(counts)
    for place in range(columns * bits % 32, 32, bits) if columns * bits % 32 else ():
        rest = (rows[:, -1] >> place) & ((1 << bits) - 1)
        counts -= torch.bincount(rest.long(), minlength=1 << bits)
    return counts


def _byte_counts(values: Tensor) -> Tensor:
    """Count the bytes of a tensor, 256 counts; two bytes at a time."""
    flat = values.reshape(-1).view(torch.uint8)
    even = flat[: flat.numel() // 2 * 2]
    if even.data_ptr() % 2:
        even = even.clone()
    counts = torch.zeros(256, dtype=torch.int64)
    if even.numel():
        counts += _halved(count_values(even.view(torch.bfloat16).view(1, 1, 1, -1))[0])
    if flat.numel() % 2:
        counts[int(flat[-1])] += 1
    return counts


def _halved(counts: Tensor) -> Tensor:
    """Turn counts of codes into those of their halves: of bytes into those of nibbles."""
    size = math.isqrt(len(counts))
    square = counts.view(size, size)
    return square.sum(0) + square.sum(1)


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
