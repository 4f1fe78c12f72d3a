"""The best of all scales, in torch: each is tried, or all are swept over."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.pieces import by_piece
from calipers.kernels.scale_search import Optimum, ScaleSearch, overflows
from calipers.kernels.tiles import runs
from calipers.numerics.formats import Format
from calipers.numerics.scales import Window, halvable_from, magnitudes_of

_TOGETHER = 32  # candidates tried at once
_RESCORED = 8  # candidates of a sweep whose errors are summed anew
_ROUNDING = 1 + 1e-5  # more than sums in float32 are off


def optimum_in_torch(search: ScaleSearch) -> Optimum:
    """Find the best scales of each piece, some pieces at a time."""
    working = torch.promote_types(search.pieces.dtype, torch.float32)
    values = by_piece(search.pieces)
    weights = None if search.weights is None else by_piece(search.weights)
    find = _sweep if search.storable is None else _enumerate
    per_piece = magnitudes_of(search.fmt).numel() if search.storable is None else _TOGETHER
    found = []
    for these in runs(len(values), each=values.shape[1] * per_piece):
        x = values[these].to(working).nan_to_num(0.0, 0.0, 0.0)
        w = torch.ones_like(x) if weights is None else weights[these].to(working)
        part = search._replace(
            low=search.low[these].to(working), high=search.high[these].to(working)
        )
        found.append(find(part, x, w))
    return Optimum(*(torch.cat(parts) for parts in zip(*found, strict=True)))


class _Kept:
    """The best candidates so far of each piece."""

    def __init__(self, like: Tensor, keep: int) -> None:
        count = len(like)
        self.scales = like.new_zeros(count, keep)
        self.windows = torch.zeros(count, keep, dtype=torch.int32, device=like.device)
        self.errors = torch.full_like(self.scales, torch.inf, dtype=torch.float64)

    def take(self, scales: Tensor, window: int, errors: Tensor) -> None:
        """Keep the best of what is kept and of new candidates, (pieces, candidates)."""
        keep = self.errors.shape[1]
        errors = torch.cat([self.errors, errors], 1)
        self.errors, at = errors.sort(dim=1, stable=True)
        self.errors, at = self.errors[:, :keep], at[:, :keep]
        windows = torch.full_like(scales, window, dtype=torch.int32)
        self.scales = torch.cat([self.scales, scales], 1).gather(1, at)
        self.windows = torch.cat([self.windows, windows], 1).gather(1, at)

    def result(self, is_zero: Tensor) -> Optimum:
        """Fill up the places of candidates that do not exist with the last one that does."""
        exists = torch.isfinite(self.errors)
        last = exists.sum(1, keepdim=True).sub(1).clamp(min=0)
        at = torch.minimum(torch.arange(exists.shape[1], device=last.device)[None], last)
        parts = [part.gather(1, at) for part in (self.scales, self.windows, self.errors)]
        return Optimum(*(part.masked_fill(is_zero[:, None], 0) for part in parts))


def _enumerate(search: ScaleSearch, x: Tensor, w: Tensor) -> Optimum:
    assert search.storable is not None
    storable = search.storable.to(x)
    halvable = halvable_from(search.storable)
    kept = _Kept(x, search.keep)
    unit = _unit(torch.maximum(-search.low, search.high))[:, None]
    x = x / unit
    for number, window in enumerate(search.windows):
        dominated = torch.maximum(search.high * window.above, -search.low * window.below) * 1.0001
        top = torch.searchsorted(storable, dominated.clamp(min=halvable)).clamp(min=1)
        for begin in range(0, int(top.max()), _TOGETHER):
            at = top[:, None] - 1 - torch.arange(begin, begin + _TOGETHER, device=x.device)
            scales = storable[at.clamp(min=0)]
            measured = (scales / unit).unsqueeze(-1)
            if begin and bool((_clip(search, x, w, window, measured[:, :1]) >= _limit(kept)).all()):
                break
            errors = _powers(_errors(search, x, window, measured), search.norm)
            errors = (errors * w.unsqueeze(1)).sum(-1, dtype=torch.float64)
            leave = (at < 0) | overflows(search, scales, *window[:3])
            kept.take(scales, number, errors.masked_fill_(leave, torch.inf))
    found = kept.result((search.low == 0) & (search.high == 0))
    return found._replace(errors=found.errors * unit.double() ** search.norm)


def _limit(kept: _Kept) -> Tensor:
    return kept.errors[:, -1] * _ROUNDING


def _unit(largest: Tensor) -> Tensor:
    """Return a power of two near each number, so that no power of a quotient leaves its type."""
    _, exponent = torch.frexp(largest)
    most = 126 if largest.dtype == torch.float32 else 1020
    return torch.ldexp(torch.ones_like(largest), exponent.clamp(-most, most))


def _errors(search: ScaleSearch, x: Tensor, window: Window, scales: Tensor) -> Tensor:
    """Return |q−x| of each value under each scale: (pieces, candidates, values)."""
    codes = x.unsqueeze(1) / scales
    if window.zero:
        codes += window.zero
    search.fmt.round_(codes.clamp_(window.lowest, window.highest))
    if window.zero:
        codes -= window.zero
    return codes.mul_(scales).sub_(x.unsqueeze(1)).abs_()


def _clip(search: ScaleSearch, x: Tensor, w: Tensor, window: Window, scales: Tensor) -> Tensor:
    """Sum what values beyond the ends of the window err by at least."""
    ends = (scales[..., 0] * (end - window.zero) for end in (window.lowest, window.highest))
    low, high = ends
    beyond = torch.maximum(x - high, low - x).clamp_(min=0)
    return (_powers(beyond, search.norm) * w).sum(-1, dtype=torch.float64)


def _powers(errors: Tensor, norm: float) -> Tensor:
    return errors.square_() if norm == 2 else errors.pow_(norm)


def _sweep(search: ScaleSearch, x: Tensor, w: Tensor) -> Optimum:
    """Look at the lowest point of every parabola between two changes of a code."""
    magnitude, w = x.double().abs(), w.double()
    total = (w * magnitude.square()).sum(1, keepdim=True)
    keep = max(search.keep, _RESCORED)
    kept = _Kept(magnitude, keep)
    for number, window in enumerate(search.windows):
        for_positive, for_negative = (_steps(search.fmt, end) for end in window[1:3][::-1])
        changes, linear, quadratic = _changes(x, magnitude, w, for_positive, for_negative)
        linear, quadratic = linear.cumsum(1), quadratic.cumsum(1)
        ends = torch.cat([changes[:, 1:], torch.zeros_like(changes[:, :1])], 1)
        lowest = torch.where(quadratic > 0, linear / quadratic, changes)
        scales = lowest.clamp(ends, changes).to(x.dtype).double()
        errors = total - scales * (2 * linear - scales * quadratic)
        leave = ~(scales > 0) | ~(changes > 0)
        leave |= overflows(search, scales.to(x.dtype), *window[:3])
        errors.masked_fill_(leave, torch.inf)
        errors, at = errors.topk(min(keep, errors.shape[1]), largest=False)
        kept.take(scales.gather(1, at), number, errors)
    found = kept.result((search.low == 0) & (search.high == 0))
    return _rescored(search, x.double(), w, found)


def _steps(fmt: Format, end: float) -> tuple[Tensor, Tensor]:
    """Return the codes up to an end, and the middles between them."""
    grid = magnitudes_of(fmt).double()
    grid = grid[grid <= abs(end)]
    return grid, (grid[1:] + grid[:-1]) / 2


def _changes(
    x: Tensor, magnitude: Tensor, w: Tensor, *sides: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where codes change, the largest scale first, and what changes in Σwxg and Σwg²."""
    parts = []
    for (grid, middles), mine in zip(sides, (x >= 0, x < 0), strict=True):
        grid, middles = grid.to(x.device), middles.to(x.device)
        here = torch.where(mine, magnitude, 0)[..., None]
        weights = torch.where(mine, w, 0)[..., None]
        linear = weights * here * grid.diff()
        quadratic = weights * grid.square().diff() * (here > 0)
        parts.append([part.flatten(1) for part in (here / middles, linear, quadratic)])
    changes, linear, quadratic = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    changes, at = changes.sort(dim=1, descending=True, stable=True)
    return changes, linear.gather(1, at), quadratic.gather(1, at)


def _rescored(search: ScaleSearch, x: Tensor, w: Tensor, found: Optimum) -> Optimum:
    """Sum the errors of a few candidates anew: differences of large sums are not exact enough."""
    errors = torch.zeros_like(found.errors)
    for number, window in enumerate(search.windows):
        scales = found.scales.masked_fill(found.scales == 0, 1).unsqueeze(-1)
        of_window = (_errors(search, x, window, scales).square_() * w.unsqueeze(1)).sum(-1)
        errors = torch.where(found.windows == number, of_window, errors)
    errors, at = errors.masked_fill_(found.scales == 0, 0).sort(dim=1, stable=True)
    at = at[:, : search.keep]
    scales = found.scales.gather(1, at).to(search.low.dtype)
    return Optimum(scales, found.windows.gather(1, at), errors[:, : search.keep])
