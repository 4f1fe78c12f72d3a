"""Number formats: which values a code can stand for, and which scales can be stored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationStrategy,
    QuantizationType,
)
from torch import Tensor

from calipers.errors import UnsupportedFormatError

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_DTYPE = torch.float8_e4m3fn
MX_GROUP_SIZE = 32


class ScaleKind(Enum):
    """What a scale may be."""

    FLOAT = "any value of the tensor's dtype, or of scale_dtype"
    E4M3_GLOBAL = "an fp8 e4m3 value, under one fp32 global scale per tensor (NVFP4)"
    POWER_OF_TWO = "a power of two, stored as its exponent (MX)"


@dataclass(frozen=True)
class Format:
    """The numbers that one code can represent, and how its scale is stored.

    >>> Format.of(QuantizationArgs(num_bits=4)).values().tolist()[:3]
    [-8.0, -7.0, -6.0]
    """

    kind: str
    bits: int
    symmetric: bool
    scale: ScaleKind

    @classmethod
    def of(cls, args: QuantizationArgs) -> Format:
        """Read the format from quantization arguments; refuse one that does not exist."""
        kind = QuantizationType(args.type).value
        supported = {"int": range(2, 9), "float": (4, 8)}
        if args.num_bits not in supported[kind]:
            raise UnsupportedFormatError(f"{kind} with {args.num_bits} bits")
        if kind == "float" and args.num_bits == 4 and not args.symmetric:
            raise UnsupportedFormatError("Asymmetric fp4")
        return cls(kind, args.num_bits, args.symmetric, _scale_kind(args, kind))

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest and the highest value of the grid."""
        if self.kind == "int":
            return -(2.0 ** (self.bits - 1)), 2.0 ** (self.bits - 1) - 1
        highest = FP4_VALUES[-1] if self.bits == 4 else torch.finfo(FP8_DTYPE).max
        return -highest, highest

    def values(self) -> Tensor:
        """Every value of the grid in ascending order, without the second zero of floats."""
        if self.kind == "int":
            low, high = self.limits
            return torch.arange(low, high + 1, dtype=torch.float32, device="cpu")
        if self.bits == 4:
            positive = torch.tensor(FP4_VALUES, dtype=torch.float32, device="cpu")
        else:
            codes = torch.arange(
                0x7F, dtype=torch.uint8, device="cpu"
            )  # 0x7F is NaN, the last one before is max
            positive = codes.view(FP8_DTYPE).float()
        return torch.cat([-positive[1:].flip(0), positive])

    def round_(self, x: Tensor) -> Tensor:
        """Round values within the limits to the grid, in place, ties to the even code."""
        if self.kind == "int":
            return x.round_()
        if self.bits == 8:
            return x.copy_(x.to(FP8_DTYPE))
        # The step of e2m1 is 1/2 below 2, 1 below 4 and 2 above: 2^exponent / 2, at least 1/2.
        magnitude = x.abs()
        step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(x.dtype)
        return x.div_(step).round_().mul_(step)


def _scale_kind(args: QuantizationArgs, kind: str) -> ScaleKind:
    if args.scale_dtype == FP8_DTYPE and args.strategy == QuantizationStrategy.TENSOR_GROUP:
        return ScaleKind.E4M3_GLOBAL
    if args.scale_dtype != torch.uint8:
        return ScaleKind.FLOAT
    grouped = args.strategy == QuantizationStrategy.GROUP and args.group_size == MX_GROUP_SIZE
    if kind == "float" and args.symmetric and grouped:
        return ScaleKind.POWER_OF_TWO
    raise UnsupportedFormatError(
        f"{kind} with {args.num_bits} bits, group_size {args.group_size} and uint8 scales "
        f"(MX scales: symmetric float, strategy group, group_size {MX_GROUP_SIZE})"
    )
