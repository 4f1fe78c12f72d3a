"""Δᵀ H Δ: the error of a layer's output, not of its weight."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.joint import by_rows, differences, in_units
from calipers.kernels.pieces import as_grid
from calipers.kernels.tiles import TILE


def quadratic_error(
    pieces: Tensor, scales: Tensor, zeros: Tensor, hessian: Tensor, args: QuantizationArgs
) -> float:
    """Return Σ Δᵀ H Δ over all rows."""
    grid = as_grid(pieces, ordered=True)[0]
    hessian = hessian.to(grid.device, torch.float32)
    grid, scales, units = in_units(grid, scales.reshape(*grid.shape[:2], 1))
    scales, zeros = scales.squeeze(-1), zeros.reshape(grid.shape[:2]).float()
    total, step = 0.0, max(1, TILE // grid[0].numel())
    for start in range(0, len(grid), step):
        these = slice(start, start + step)
        for x in by_rows(grid[these]):
            rows = differences(x.float(), scales[these], zeros[these], args)
            rows = rows.transpose(1, 2).flatten(0, 1)
            blocks = rows.reshape(len(rows), len(hessian), -1).transpose(0, 1)
            forms = torch.bmm(blocks, hessian) * blocks
            if units is not None:
                of_rows = forms.sum((0, 2), dtype=torch.float64).clamp_(min=0)
                forms = of_rows * units[these].square().repeat_interleave(x.shape[2])
            total += float(forms.sum(dtype=torch.float64))
    return total
