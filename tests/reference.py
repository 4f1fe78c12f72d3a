"""A second, slow and plain implementation in float64, by which the fast one is judged.

It shares nothing with Calipers: tensors are cut by loops over indices, and values are rounded by
looking for the nearest number of an explicitly written grid. Scales come from compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor


def grid_of(args: QuantizationArgs) -> np.ndarray:
    """Every number a code stands for, so ordered that even positions are even codes."""
    if args.type == "int":
        return np.arange(-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1), dtype=np.float64)
    mantissa, bias = (1, 1) if args.num_bits == 4 else (3, 7)
    codes = range(2 ** (args.num_bits - 1) - (0 if args.num_bits == 4 else 1))  # e4m3: last is NaN
    positive = []
    for code in codes:
        exponent, fraction = code >> mantissa, (code & (2**mantissa - 1)) / 2**mantissa
        subnormal = exponent == 0
        positive.append((fraction + (not subnormal)) * 2.0 ** (exponent + subnormal - bias))
    return np.array([-v for v in reversed(positive[1:])] + positive)


def round_to_grid(x: np.ndarray, args: QuantizationArgs) -> np.ndarray:
    """The nearest number of the grid; of two equally near ones that with the even code."""
    grid = grid_of(args)
    zero = int(np.flatnonzero(grid == 0)[0])
    x = np.clip(x, grid[0], grid[-1])
    above = np.clip(np.searchsorted(grid, x), 1, len(grid) - 1)
    below = above - 1
    to_below, to_above = x - grid[below], grid[above] - x
    even_above = (above - zero) % 2 == 0
    take_above = (to_above < to_below) | ((to_above == to_below) & even_above)
    return np.where(take_above, grid[above], grid[below])


def quantized(x: np.ndarray, scale: float, zero_point: float, args: QuantizationArgs) -> np.ndarray:
    zero_point = 0.0 if args.symmetric else zero_point
    return (round_to_grid(x / scale + zero_point, args) - zero_point) * scale


def pieces(value: Tensor, base_name: str, args: QuantizationArgs) -> dict[tuple[int, ...], Tensor]:
    """The values that share a scale, by the index of that scale."""
    found: dict[tuple[int, ...], list[Tensor]] = {}
    for index in np.ndindex(*value.shape):
        found.setdefault(_home(index, base_name, args), []).append(value[index])
    return {home: torch.stack(values) for home, values in sorted(found.items())}


def _home(index: tuple[int, ...], base_name: str, args: QuantizationArgs) -> tuple[int, ...]:
    if args.strategy == "tensor":
        return (0,)
    if args.strategy == "channel":
        return (index[0], 0)
    if args.strategy == "block":
        height, width = args.block_structure
        return (index[0] // height, index[1] // width)
    if args.strategy == "attn_head":
        return (index[1], 0, 0)
    if args.strategy == "token":
        return index[1:-1]
    group = index[-1] // args.group_size
    return (index[0], group) if base_name == "weight" else (group,)


def extrema(value: Tensor, base_name: str, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    cut = pieces(value, base_name, args)
    shape = [1 + max(home[axis] for home in cut) for axis in range(len(next(iter(cut))))]
    low, high = torch.empty(shape, dtype=value.dtype), torch.empty(shape, dtype=value.dtype)
    for home, values in cut.items():
        # Blocks at the edge are padded with zeros.
        padded = args.strategy == "block" and len(values) < np.prod(args.block_structure)
        values = torch.cat([values, values.new_zeros(1)]) if padded else values
        low[home], high[home] = values.min(), values.max()
    return low, high


def candidate_errors(
    value: Tensor,
    base_name: str,
    args: QuantizationArgs,
    low: Tensor,
    high: Tensor,
    factors: Sequence[float],
    norm: float,
    importance: np.ndarray | None = None,
    dtype: torch.dtype = torch.float32,
) -> np.ndarray:
    """Σ w·|q−x|^norm of every factor (rows) and piece (columns); ``dtype`` is what scales have."""
    judged = args
    if args.strategy == "tensor_group":
        judged = args.model_copy(update={"scale_dtype": None})
    weights = torch.ones(value.shape, dtype=torch.float64)
    if importance is not None:
        weights = weights * torch.from_numpy(importance)
    cut, cut_weights = pieces(value, base_name, args), pieces(weights, base_name, args)
    errors = np.empty((len(factors), len(cut)))
    for row, factor in enumerate(factors):
        start, end = (low.float() * factor).to(dtype), (high.float() * factor).to(dtype)
        if dtype == torch.float16 and args.scale_dtype == torch.bfloat16:
            start, end = start.float(), end.float()  # the library cannot do this in float16
        scales, zeros = calculate_qparams(start, end, judged)
        scales, zeros = scales.reshape(low.shape), zeros.reshape(low.shape)
        for column, (home, values) in enumerate(cut.items()):
            x = values.double().numpy()
            q = quantized(x, float(scales[home]), float(zeros[home]), args)
            errors[row, column] = (cut_weights[home].numpy() * np.abs(q - x) ** norm).sum()
    return errors
