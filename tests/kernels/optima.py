"""Searches for the best scale, and what they should have found by brute force."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import brute
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from data import EIGHTEEN, draw
from torch import Tensor

from calipers.kernels import describe
from calipers.kernels.optimum import Optimum, ScaleSearch, best_scales
from calipers.numerics.formats import Format, storable_scales, windows_of

NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": brute.FP8,
}
FP8_ASYM = {"num_bits": 8, "type": "float", "symmetric": False}
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
FORMATS: dict[str, dict[str, Any]] = {
    "int2": {"num_bits": 2},
    "int3": {"num_bits": 3},
    "int4": {"num_bits": 4},
    "int8": {"num_bits": 8},
    "int3_signed": {"num_bits": 3},
    "int4_signed": {"num_bits": 4},
    "int3_asym": {"num_bits": 3, "symmetric": False},
    "int4_asym": {"num_bits": 4, "symmetric": False},
    "fp8": {"num_bits": 8, "type": "float"},
    "fp4": {"num_bits": 4, "type": "float"},
    "nvfp4": NVFP4,
    "mxfp4": {"num_bits": 4, **MX},
    "mxfp8": {"num_bits": 8, **MX},
}
INT4 = QuantizationArgs(num_bits=4)


class Search(NamedTuple):
    """How scales are looked for; hashable, so that brute force is asked once for all engines."""

    fmt: str
    dtype: torch.dtype = torch.bfloat16
    norm: float = 2.0

    @property
    def args(self) -> QuantizationArgs:
        return QuantizationArgs(**(FORMATS | {"fp8_asym": FP8_ASYM})[self.fmt])

    @property
    def signed(self) -> bool:
        return self.fmt.endswith("signed")

    @property
    def regret(self) -> float:
        """Under a global scale, scales have 24 bits: without FMA, codes times scales round."""
        has_fma = describe().instruction_set in ("avx2", "avx512", "neon")
        return 1e-6 if has_fma or self.fmt != "nvfp4" else 1e-5

    @property
    def rounding(self) -> float:
        """How far float32 is off; roots make more of small differences."""
        return 1e-5 if self.norm >= 1 else 1e-4

    @property
    def global_scale(self) -> Tensor | None:
        return torch.tensor([448 * 6 / 40]) if self.fmt == "nvfp4" else None

    def scales(self, x: Tensor) -> Tensor:
        """All that can be stored, far beyond what can matter; as float32 has them."""
        if self.fmt == "nvfp4":
            return (brute.floats_of(brute.FP8).float() / self.global_scale).double()
        if self.fmt.startswith("mx"):
            ends = (-24, 16) if self.dtype == torch.float16 else (-127, 128)
            return torch.arange(*ends, dtype=torch.float64).exp2()
        return brute.around(brute.floats_of(self.dtype), x)

    def find(self, x: Tensor, weights: Tensor | None = None, keep: int = 1) -> Optimum:
        fmt = Format.of(self.args)
        finite = x.nan_to_num(0.0, 0.0, 0.0)
        return best_scales(
            ScaleSearch(
                x,
                finite.amin((0, -2, -1)),
                finite.amax((0, -2, -1)),
                fmt,
                windows=windows_of(fmt, self.signed),
                storable=storable_scales(fmt, self.dtype, self.global_scale),
                norm=self.norm,
                weights=weights,
                keep=keep,
                most=torch.finfo(x.dtype).max,
            )
        )

    def error(self, x: Tensor, scale: Tensor, window: Tensor, weights: Tensor | None) -> float:
        """The error of a finding, in float64."""
        if not scale:
            return float((x != 0).sum())
        sign = -1 if self.signed and window else 1
        zero = brute.zero_points(self.args)[0 if self.signed else int(window)]
        found = brute.errors(x, sign * scale.reshape(1), self.args, zero, self.norm, weights)
        return float(found)

    def check(self, x: Tensor, found: Optimum, weights: Tensor | None = None) -> None:
        """Every piece has the best scale, and the error that is claimed for it."""
        values, w = by_piece(x), None if weights is None else by_piece(weights.expand(x.shape))
        parts = zip(*(part.reshape(len(values), -1) for part in found), strict=True)
        for piece, (scales, windows, claims) in enumerate(parts):
            mine = None if w is None else w[piece]
            error = self.error(values[piece], scales[0], windows[0], mine)
            least = least_error(self, values[piece], mine)
            assert error <= least * (1 + self.regret), (piece, error, least)
            assert float(claims[0]) == pytest.approx(error, rel=self.rounding, abs=0)


def by_piece(x: Tensor) -> Tensor:
    """Values of each piece in a row; by a loop, which the kernels do not share."""
    return torch.stack(
        [x[:, i, j].flatten() for i in range(x.shape[1]) for j in range(x.shape[2])]
    ).nan_to_num(0.0, 0.0, 0.0)


_KNOWN: dict[tuple[object, ...], float] = {}


def least_error(search: Search, x: Tensor, weights: Tensor | None) -> float:
    """Brute force, remembered: the engines are asked about the same values."""
    key = (search, tuple(x.tolist()), None if weights is None else tuple(weights.tolist()))
    if key not in _KNOWN:
        scales = search.scales(x)
        found = brute.all_errors(x, scales, search.args, search.norm, weights, search.signed)
        _KNOWN[key] = float(found.min()) if x.any() else 0.0
    return _KNOWN[key]


@cache
def eighteen(length: int, dtype: torch.dtype) -> Tensor:
    """A piece of each distribution."""
    torch.manual_seed(length)
    return torch.stack([draw(kind, (1, 1, length), dtype) for kind in EIGHTEEN], 1)
