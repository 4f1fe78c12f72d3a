"""Named distributions, and the schemes that tests are run for."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _with_outlier(x: Tensor) -> Tensor:
    x.flatten()[0] = 40.0
    return x


DISTRIBUTIONS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "gaussian": lambda shape: torch.randn(shape),
    "student_t": lambda shape: torch.randn(shape) / torch.rand(shape).clamp(0.02).sqrt(),
    "uniform": lambda shape: torch.rand(shape) * 2 - 1,
    "positive": lambda shape: torch.rand(shape) + 0.5,
    "negative": lambda shape: -torch.rand(shape) - 0.5,
    "one_outlier": lambda shape: _with_outlier(torch.randn(shape) * 0.1),
    "constant": lambda shape: torch.full(shape, 0.7),
    "zeros": lambda shape: torch.zeros(shape),
    "tiny": lambda shape: torch.randn(shape) * 1e-3,
    "large": lambda shape: torch.randn(shape) * 1e3,
}


def _two_clusters(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) * 0.02 + torch.where(torch.rand(shape) < 0.7, 0.2, -1.1)


def _with_heavy_outliers(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape) * torch.where(torch.rand(shape) < 0.1, 30.0, 1.0)


_MORE: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "laplace": lambda shape: torch.empty(shape).exponential_() * torch.randn(shape).sign(),
    "two_clusters": _two_clusters,
    "lognormal": lambda shape: torch.empty(shape).log_normal_(),
    "sparse": lambda shape: torch.randn(shape) * (torch.rand(shape) < 0.1),
    "two_values": lambda shape: torch.where(torch.rand(shape) < 0.3, -0.37, 1.3),
    "ramp": lambda shape: torch.linspace(-1, 1.7, math.prod(shape)).reshape(shape),
    "heavy_outliers": _with_heavy_outliers,
}
_ENDS_OF_A_DTYPE: dict[str, Callable[[torch.dtype], float]] = {
    "denormals": lambda dtype: torch.finfo(dtype).smallest_normal,
    "huge": lambda dtype: torch.finfo(dtype).max,
}
EIGHTEEN = sorted({*DISTRIBUTIONS, *_MORE, *_ENDS_OF_A_DTYPE} - {"large"})
"""Names of the distributions that an optimum is found for."""


def draw(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw from one of the eighteen."""
    if kind in _ENDS_OF_A_DTYPE:
        return ((torch.rand(shape) * 2 - 1) * _ENDS_OF_A_DTYPE[kind](dtype)).to(dtype)
    return (DISTRIBUTIONS | _MORE)[kind](shape).to(dtype)


FORMATS: dict[str, dict[str, object]] = {
    "int2": {"num_bits": 2},
    "int3": {"num_bits": 3},
    "int4": {"num_bits": 4},
    "int4_asym": {"num_bits": 4, "symmetric": False},
    "int5": {"num_bits": 5},
    "int6": {"num_bits": 6},
    "int7": {"num_bits": 7},
    "int8": {"num_bits": 8},
    "int8_asym": {"num_bits": 8, "symmetric": False},
    "fp8": {"num_bits": 8, "type": "float"},
    "fp8_asym": {"num_bits": 8, "type": "float", "symmetric": False},
    "fp4": {"num_bits": 4, "type": "float"},
}

CUTS: dict[str, tuple[str, tuple[int, ...], dict[str, object]]] = {
    "weight-tensor": ("weight", (6, 64), {"strategy": "tensor"}),
    "weight-channel": ("weight", (6, 64), {"strategy": "channel"}),
    "weight-group": ("weight", (6, 64), {"strategy": "group", "group_size": 32}),
    "weight-tensor_group": ("weight", (6, 64), {"strategy": "tensor_group", "group_size": 16}),
    "weight-block": ("weight", (6, 60), {"strategy": "block", "block_structure": [4, 16]}),
    "input-tensor": ("input", (2, 3, 64), {"strategy": "tensor"}),
    "input-group": ("input", (2, 3, 64), {"strategy": "group", "group_size": 32}),
    "output-tensor_group": ("output", (5, 64), {"strategy": "tensor_group", "group_size": 16}),
    "input-token": ("input", (2, 3, 64), {"strategy": "token", "dynamic": True}),
    "q-tensor": ("q", (2, 3, 5, 16), {"strategy": "tensor"}),
    "k-attn_head": ("k", (2, 3, 5, 16), {"strategy": "attn_head"}),
    "v-attn_head": ("v", (1, 4, 3, 8), {"strategy": "attn_head"}),
}
"""name: what is observed, its shape, how it is cut"""

SCALE_FORMATS: dict[str, tuple[str, dict[str, object]]] = {
    "nvfp4": (
        "weight-tensor_group",
        {"num_bits": 4, "type": "float", "scale_dtype": torch.float8_e4m3fn},
    ),
    "nvfp4-output": (
        "output-tensor_group",
        {"num_bits": 4, "type": "float", "scale_dtype": torch.float8_e4m3fn},
    ),
    "mxfp4": ("weight-group", {"num_bits": 4, "type": "float", "scale_dtype": torch.uint8}),
    "mxfp8": ("weight-group", {"num_bits": 8, "type": "float", "scale_dtype": torch.uint8}),
    "int4-bf16-scale": ("weight-group", {"num_bits": 4, "scale_dtype": torch.bfloat16}),
}
"""name: the cut, and a format whose scale is stored in a type of its own"""


def nvfp4(group_size: int) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=group_size,
        scale_dtype=torch.float8_e4m3fn,
    )


def schemes() -> dict[str, tuple[str, tuple[int, ...], QuantizationArgs]]:
    """Every format with every cut, and the formats whose scales ask for one cut."""
    pairs = [(f"{cut}-{fmt}", cut, FORMATS[fmt]) for cut in CUTS for fmt in FORMATS]
    pairs += [(name, cut, fmt) for name, (cut, fmt) in SCALE_FORMATS.items()]
    return {
        name: (CUTS[cut][0], CUTS[cut][1], QuantizationArgs(**CUTS[cut][2], **fmt))
        for name, cut, fmt in pairs
    }
