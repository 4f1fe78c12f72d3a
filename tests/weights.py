"""Layers, their inputs and their weights, and what the best parameters of a weight cost."""

from __future__ import annotations

from typing import Any

import brute
import reference
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import fake_quantize
from data import FORMATS, nvfp4
from torch import Tensor

from calipers.observers import Observer

COLUMNS = 64
CUTS: dict[str, dict[str, Any]] = {
    "tensor": {"strategy": "tensor"},
    "channel": {"strategy": "channel"},
    "group": {"strategy": "group", "group_size": 16},
    "tensor_group": {"strategy": "tensor_group", "group_size": 16},
    "block": {"strategy": "block", "block_structure": [2, 24]},  # two of them are cut off
}
INT4 = QuantizationArgs(num_bits=4, group_size=16)
MX = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}
SCALES = {
    "nvfp4": nvfp4(16),
    "mxfp4": QuantizationArgs(num_bits=4, **MX),
    "mxfp8": QuantizationArgs(num_bits=8, **MX),
}
IMPORTANCES = ("none", "imatrix", "hessian")


def build(args: QuantizationArgs = INT4, importance: str = "none", **options: Any) -> Observer:
    return Observer.load_from_registry(
        "optimal", base_name="weight", args=args, importance=importance, **options
    )


def inputs(tokens: int = 200, columns: int = COLUMNS) -> Tensor:
    mix = torch.eye(columns) + 0.5 * torch.randn(columns, columns) / columns**0.5
    return torch.randn(tokens, columns) * torch.logspace(-1.5, 0.7, columns) @ mix


def layer(rows: int = 4, columns: int = COLUMNS, dtype: torch.dtype = torch.bfloat16) -> Any:
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = torch.randn(rows, columns) * 0.3
    return linear.requires_grad_(False).to(dtype)


def gathered(linear: Any, x: Tensor, args: QuantizationArgs = INT4, **options: Any) -> Observer:
    observer = build(args, **options)
    observer.attach(linear)
    linear(x.to(linear.weight.dtype))
    observer.detach(linear)
    return observer


def rounded(
    weight: Tensor, qparams: Any, args: QuantizationArgs, dtype: torch.dtype = torch.float64
) -> Tensor:
    """What compressed-tensors makes of a weight."""
    parts = [qparams[name].to(dtype) for name in ("scale", "zero_point")]
    global_scale = qparams["global_scale"]
    global_scale = None if global_scale is None else global_scale.to(dtype)
    return fake_quantize(weight.detach().to(dtype), *parts, args, global_scale=global_scale)


def error(
    weight: Tensor, qparams: Any, args: QuantizationArgs, importance: Tensor | None = None
) -> float:
    difference = rounded(weight, qparams, args) - weight.detach().double()
    return float((difference.square() * (1 if importance is None else importance)).sum())


def normalized(x: Tensor) -> Tensor:
    """E[x²] over its mean."""
    squares = x.double().square().mean(0)
    return squares / squares.mean()


def least_error(
    weight: Tensor,
    args: QuantizationArgs,
    scales: Tensor | None = None,
    importance: Tensor | None = None,
    signed: bool = False,
) -> float:
    """The sum over all pieces of the least error that any storable scale gives."""
    weight = weight.detach()
    weights = torch.ones(weight.shape, dtype=torch.float64)
    weights = weights if importance is None else weights * importance
    cut, of_cut = (reference.pieces(part, "weight", args) for part in (weight, weights))
    total = 0.0
    for home, values in cut.items():
        storable = brute.floats_of(weight.dtype) if scales is None else scales
        storable = brute.around(storable, values) if scales is None else storable
        if values.any():
            errors = brute.all_errors(values, storable, args, 2.0, of_cut[home], signed)
            total += float(errors.min())
    return total


def arguments(cut: str, fmt: str) -> QuantizationArgs:
    return QuantizationArgs(**FORMATS[fmt], **CUTS[cut])


FIELDS = {
    "imatrix": ("_imatrix_sum", "_imatrix_count"),
    "hessian": ("_hessian_sum", "_hessian_count"),
}


def quadratic(weight: Tensor, qparams: Any, args: QuantizationArgs, hessian: Tensor) -> float:
    """Σ Δᵀ H Δ over rows and blocks on the diagonal.

    Codes are those of float32, as they will be: at a tie, which float64 may see otherwise, both
    have the same distance, but not the same Δᵀ H Δ.
    """
    difference = rounded(weight, qparams, args, torch.float32) - weight.detach().double()
    width = hessian.shape[-1]
    blocks = difference.reshape(len(difference), -1, width)
    return float(torch.einsum("rbi,bij,rbj->", blocks, hessian, blocks))


def blocks_of(x: Tensor, width: int) -> Tensor:
    whole = x.double().T @ x.double() / len(x)
    blocks = [whole[i : i + width, i : i + width] for i in range(0, len(whole), width)]
    return torch.stack(blocks) / whole.diagonal().mean()


def local_scales(global_scale: Tensor) -> Tensor:
    return (brute.floats_of(brute.FP8).float() / global_scale).double()
