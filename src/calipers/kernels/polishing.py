"""Scales of few digits, moved to where their codes err least."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.pieces import by_piece
from calipers.kernels.scale_search import Optimum, ScaleSearch, overflows
from calipers.kernels.tiles import runs

_POLISHINGS = 20


def polished(search: ScaleSearch, found: Optimum) -> Optimum:
    """Move each scale to the lowest point of its parabola, as long as that lowers the error."""
    values = by_piece(search.pieces)
    weights = None if search.weights is None else by_piece(search.weights)
    parts = []
    for these in runs(len(values), each=values.shape[1] * search.keep):
        w = None if weights is None else weights[these]
        few = Optimum(*(part[these] for part in found))
        part = search._replace(low=search.low[these], high=search.high[these])
        parts.append(_polished_part(part, values[these], w, few))
    return Optimum(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _polished_part(
    search: ScaleSearch, values: Tensor, weights: Tensor | None, found: Optimum
) -> Optimum:
    scales, windows, _ = found
    zero, low, high = _ends(search, windows)
    lowest, errors = _lowest_points(search, values, weights, scales, windows)
    for _ in range(_POLISHINGS):
        further, new_errors = _lowest_points(search, values, weights, lowest, windows)
        better = (new_errors < errors) & (lowest > 0) & ~overflows(search, lowest, zero, low, high)
        if not bool(better.any()):
            break
        scales = torch.where(better, lowest, scales)
        errors = torch.where(better, new_errors, errors)
        lowest = torch.where(better, further, scales)
    errors, order = errors.sort(dim=1, stable=True)
    return Optimum(scales.gather(1, order), windows.gather(1, order), errors)


def _lowest_points(
    search: ScaleSearch, values: Tensor, weights: Tensor | None, scales: Tensor, windows: Tensor
) -> tuple[Tensor, Tensor]:
    """Return where the codes of each scale err least, and how much they err at the scale itself."""
    zero, low, high = (end.unsqueeze(-1) for end in _ends(search, windows))
    divisors = scales.masked_fill(scales == 0, 1).double().unsqueeze(-1)
    linear, quadratic, errors = torch.zeros(3, *scales.shape, dtype=torch.float64).to(scales.device)
    for these in runs(values.shape[1]):
        x = values[:, these].double().nan_to_num(0.0, 0.0, 0.0).unsqueeze(1)
        w = 1.0 if weights is None else weights[:, these].double().unsqueeze(1)
        codes = search.fmt.round_((x / divisors + zero).clamp_(low, high)).sub_(zero)
        linear += (w * x * codes).sum(-1)
        quadratic += (w * codes * codes).sum(-1)
        errors += ((codes * divisors - x).square_() * w).sum(-1)
    return (linear / quadratic).nan_to_num(0.0, 0.0, 0.0).to(scales.dtype), errors


def _ends(search: ScaleSearch, windows: Tensor) -> tuple[Tensor, ...]:
    """Return the zero point, the lowest and the highest code of each of some windows."""
    ends = torch.tensor(search.windows, dtype=torch.float64, device=windows.device)
    return ends[windows.long()][..., :3].unbind(-1)
