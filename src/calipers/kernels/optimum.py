"""The best of all scales that can be stored: each is tried, or all are swept over.

Every storable scale is tried, from the largest that can matter, until clipped values alone err too
much. Among all floats the error is a parabola between two scales at which a code changes: a sweep
over those changes looks at the lowest point of each. Where that is too much work, scales of few
digits are tried, and the best ones moved to where their codes err least.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.operations import Workload, operation
from calipers.kernels.reductions import are_worth_counting, distinct_values
from calipers.kernels.resources import runs
from calipers.numerics.formats import Format, Window, halvable_from, magnitudes_of, storable_scales
from calipers.numerics.layout import by_piece, length_of

_MOST_SWEPT = 1 << 18  # values of a piece
_MOST_SORTED = 1 << 25  # scales at which codes of one piece change, in torch
_TOGETHER = 32  # candidates tried at once
_RESCORED = 8  # candidates of a sweep whose errors are summed anew
_ROUNDING = 1 + 1e-5  # more than sums in float32 are off
_POLISHED = 4  # candidates of a piece that are moved to where their codes err least
_POLISHINGS = 20  # moves at most


class Optimum(NamedTuple):
    """The best candidates of each piece, in the last dimension, the best one first.

    Scales twice as large as need be, which cannot be best alone, are not among them.

    ``scales`` are positive, in float32 or float64, and zero where a piece has only zeros;
    ``windows`` says which window goes with each, ``errors`` is Σ w·|q−x|^norm in float64. Where a
    piece has fewer candidates than were asked for, the last one is repeated.
    """

    scales: Tensor
    windows: Tensor
    errors: Tensor


class ScaleSearch(NamedTuple):
    """What is searched: scales and windows for each piece, and how their errors count.

    :param pieces: (observations, *qparam_shape, rows, columns)
    :param low: the least value of each piece, in the qparam shape
    :param storable: the scales to choose from, ascending; None stands for every float, and asks for
        norm 2
    :param weights: not negative; broadcasts with the pieces
    :param keep: how many of the best candidates of a piece are wanted
    :param most: no scale is taken under which a value becomes one beyond it
    """

    pieces: Tensor
    low: Tensor
    high: Tensor
    fmt: Format
    windows: Sequence[Window]
    storable: Tensor | None
    norm: float = 2.0
    weights: Tensor | None = None
    keep: int = 1
    most: float = torch.inf


def overflows(search: ScaleSearch, scales: Tensor, *window: Tensor | float) -> Tensor:
    """Whether an extremum, hence any value, becomes too large: scales are (pieces, candidates).

    :param window: its zero point, its lowest and its highest code
    """
    zero, lowest, highest = (torch.as_tensor(end, device=scales.device) for end in window)
    ends = torch.stack([search.low, search.high]).to(scales).unsqueeze(-1)
    codes = (ends / scales.masked_fill(scales == 0, 1) + zero).clamp(lowest, highest)
    largest = (search.fmt.round_(codes) - zero).mul_(scales).abs_().amax(0)
    return ~(largest <= search.most)


@torch.no_grad()
def best_scales(search: ScaleSearch) -> Optimum:
    """Find for each piece the scale and the window with the least Σ w·|q−x|^norm.

    Where every float can be stored, but there is a window per zero point, or a piece has more than
    2¹⁸ values, scales of 8 significant bits are tried, and the best ones moved to where their codes
    err least, until those stay. NaN and Inf count as zero, which quantizes without error.
    """
    pieces, weights, shape = search.pieces, search.weights, search.low.shape
    if search.storable is None and search.norm != 2:
        raise ValueError("Only squared errors can be minimized over every float.")
    if weights is None and are_worth_counting(pieces):
        values, counts = distinct_values(pieces)
        pieces = values.expand(1, *pieces.shape[1:-2], 1, -1)
        weights = counts.unsqueeze(-2)
    if weights is not None:
        weights = weights.to(pieces.device, torch.promote_types(pieces.dtype, torch.float32))
        weights = weights.expand(pieces.shape)
    # Zero is in every range.
    low, high = search.low.reshape(-1).clamp(max=0), search.high.reshape(-1).clamp(min=0)
    search = search._replace(pieces=pieces, low=low, high=high, weights=weights)
    if search.storable is not None:
        found = try_scales(search)
    elif len(search.windows) <= 2 and length_of(pieces) <= _MOST_SWEPT:
        found = sweep_scales(search)
    else:
        found = _polished(search)
    return Optimum(*(part.reshape(*shape, search.keep) for part in found))


@operation(lambda search: Workload((search.pieces,), search.fmt, search.norm))
def try_scales(search: ScaleSearch) -> Optimum:
    """Return the best of the scales that can be stored."""
    return optimum_in_torch(search)


# Numbers of the format are given to a sweep as values, so that a backend need not know the format.
@operation(lambda search: Workload((search.pieces,)))
def sweep_scales(search: ScaleSearch) -> Optimum:
    """Return the best of all floats, by squared errors."""
    if length_of(search.pieces) * len(magnitudes_of(search.fmt)) > _MOST_SORTED:
        return _polished(search)
    return optimum_in_torch(search)


def _polished(search: ScaleSearch) -> Optimum:
    """Try scales of 8 significant bits, and move the best ones to where their codes err least."""
    eight_bits = storable_scales(search.fmt, torch.bfloat16)
    more = search._replace(storable=eight_bits, keep=max(search.keep, _POLISHED))
    found, values = try_scales(more), by_piece(search.pieces)
    weights = None if search.weights is None else by_piece(search.weights)
    parts = []
    for these in runs(len(values), each=values.shape[1] * more.keep):
        w = None if weights is None else weights[these]
        few = Optimum(*(part[these] for part in found))
        part = more._replace(low=search.low[these], high=search.high[these])
        parts.append(_moved(part, values[these], w, few))
    return Optimum(*(torch.cat(part)[:, : search.keep] for part in zip(*parts, strict=True)))


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
    # Values are measured in a power of two near the largest, so that no power of them leaves their
    # type; dividing by it is exact.
    _, exponent = torch.frexp(torch.maximum(-search.low, search.high))
    most = 126 if x.dtype == torch.float32 else 1020
    unit = torch.ldexp(torch.ones_like(search.low), exponent.clamp(-most, most))[:, None]
    x = x / unit
    for number, window in enumerate(search.windows):
        dominated = torch.maximum(search.high * window.above, -search.low * window.below) * 1.0001
        top = torch.searchsorted(storable, dominated.clamp(min=halvable)).clamp(min=1)
        for begin in range(0, int(top.max()), _TOGETHER):
            at = top[:, None] - 1 - torch.arange(begin, begin + _TOGETHER, device=x.device)
            scales = storable[at.clamp(min=0)]
            measured = (scales / unit).unsqueeze(-1)
            # Smaller scales clip more: values beyond the ends of the window err by so much at
            # least, and they cannot become better than what is kept.
            if begin:
                low, high = (measured[:, :1, 0] * (end - window.zero) for end in window[1:3])
                beyond = torch.maximum(x - high, low - x).clamp_(min=0)
                clipped = (_powers(beyond, search.norm) * w).sum(-1, dtype=torch.float64)
                if bool((clipped >= kept.errors[:, -1] * _ROUNDING).all()):
                    break
            errors = _powers(_errors(search, x, window, measured), search.norm)
            errors = (errors * w.unsqueeze(1)).sum(-1, dtype=torch.float64)
            leave = (at < 0) | overflows(search, scales, *window[:3])
            kept.take(scales, number, errors.masked_fill_(leave, torch.inf))
    found = kept.result((search.low == 0) & (search.high == 0))
    return found._replace(errors=found.errors * unit.double() ** search.norm)


def _errors(search: ScaleSearch, x: Tensor, window: Window, scales: Tensor) -> Tensor:
    """Return |q−x| of each value under each scale: (pieces, candidates, values)."""
    codes = x.unsqueeze(1) / scales
    if window.zero:
        codes += window.zero
    search.fmt.round_(codes.clamp_(window.lowest, window.highest))
    if window.zero:
        codes -= window.zero
    return codes.mul_(scales).sub_(x.unsqueeze(1)).abs_()


def _powers(errors: Tensor, norm: float) -> Tensor:
    return errors.square_() if norm == 2 else errors.pow_(norm)


def _sweep(search: ScaleSearch, x: Tensor, w: Tensor) -> Optimum:
    """Look at the lowest point of every parabola between two changes of a code."""
    magnitude, w = x.double().abs(), w.double()
    total = (w * magnitude.square()).sum(1, keepdim=True)
    keep = max(search.keep, _RESCORED)
    kept = _Kept(magnitude, keep)
    for number, window in enumerate(search.windows):
        changes, linear, quadratic = _changes(search.fmt, window, x, magnitude, w)
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
    # Differences of large sums are not exact enough: the errors of a few are summed anew.
    x, divisors = x.double(), found.scales.masked_fill(found.scales == 0, 1).unsqueeze(-1)
    errors = torch.zeros_like(found.errors)
    for number, window in enumerate(search.windows):
        of_window = (_errors(search, x, window, divisors).square_() * w.unsqueeze(1)).sum(-1)
        errors = torch.where(found.windows == number, of_window, errors)
    errors, at = errors.masked_fill_(found.scales == 0, 0).sort(dim=1, stable=True)
    at = at[:, : search.keep]
    scales = found.scales.gather(1, at).to(search.low.dtype)
    return Optimum(scales, found.windows.gather(1, at), errors[:, : search.keep])


def _changes(
    fmt: Format, window: Window, x: Tensor, magnitude: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where codes change, the largest scale first, and what changes in Σwxg and Σwg²."""
    parts, magnitudes = [], magnitudes_of(fmt).double()
    for end, mine in ((window.highest, x >= 0), (window.lowest, x < 0)):
        grid = magnitudes[magnitudes <= abs(end)].to(x.device)
        middles = (grid[1:] + grid[:-1]) / 2
        here = torch.where(mine, magnitude, 0)[..., None]
        weights = torch.where(mine, w, 0)[..., None]
        linear = weights * here * grid.diff()
        quadratic = weights * grid.square().diff() * (here > 0)
        parts.append([part.flatten(1) for part in (here / middles, linear, quadratic)])
    changes, linear, quadratic = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    changes, at = changes.sort(dim=1, descending=True, stable=True)
    return changes, linear.gather(1, at), quadratic.gather(1, at)


def _moved(search: ScaleSearch, values: Tensor, weights: Tensor | None, found: Optimum) -> Optimum:
    """Move each scale to the lowest point of its parabola, as long as that lowers the error."""
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
