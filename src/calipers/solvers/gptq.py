"""Error feedback (GPTQ): a weight is rounded so that its errors make up for each other.

What the output of a row loses is Δᵀ H Δ, Δ = q − w, with H = E[x xᵀ] of its inputs. Columns are
rounded one after the other, each with the errors of those before it; then every value moves to the
best code that all others leave it, and scales to what is best for the codes, in turns. Rounding to
nearest is the fallback of each row: no row loses more than with it.

With the codes kept, the loss Δᵀ H Δ is a parabola in each scale, whose lowest point is known. A
scale moves there, as near as a checkpoint can store, where that lowers the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.hessian import LEAST_GAIN, Rounding, descend, feed_back
from calipers.statistics.sums import HessianSums, shrunk

_LEAST_DAMPING, _LARGEST_DAMPING = 1e-10, 1.0  # that are tried, of the mean of the diagonal
_BLOCK = 128  # columns at least whose slopes are worked out together
_COARSE = 1 << 10  # fewer storable scales than this are far apart
DAMPING = 0.01
CORRECTION_DAMPING = 0.05
"""At least: what earlier layers lost is known less well than inputs are."""


class Regularization(NamedTuple):
    """How far the data of a weight is not trusted; both in terms of the mean of the diagonal of H.

    :param damping: what is added to the diagonal where errors are fed back
    :param correction: the same where the weight is corrected for what its inputs have become
    """

    damping: float = DAMPING
    correction: float = CORRECTION_DAMPING

    @classmethod
    def given(cls, damping: float) -> Regularization:
        """Return that of a given damping, by which corrections are damped, too."""
        return cls(damping, max(damping, CORRECTION_DAMPING))


class Moments(NamedTuple):
    """What was seen of the inputs of a weight: x as they were, y as they have become.

    :param hessian: H = Σ y yᵀ over all tokens, (columns, columns), in float64
    :param tokens: how many there were
    :param cross: C = Σ x yᵀ; None where there is one stream
    :param residual: D = Σ d yᵀ, d what that has lost to which the output is added, (rows, columns);
        None where there is nothing to make up for
    """

    hessian: Tensor
    tokens: int
    cross: Tensor | None = None
    residual: Tensor | None = None

    @classmethod
    def of(cls, sums: HessianSums) -> Moments:
        """Read sums of one block."""
        optional = (None if each is None else each[0] for each in (sums.crosses, sums.residuals))
        return cls(sums.hessians[0], sums.num_tokens, *optional)

    @classmethod
    def sum_of(cls, parts: Sequence[Moments]) -> Moments:
        """Return what was seen of all parts of the data."""
        total = parts[0]
        for part in parts[1:]:
            total = total._combined(part, 1)
        return total

    def less(self, part: Moments) -> Moments:
        """Return what was seen of all data but a part."""
        return self._combined(part, -1)

    def _combined(self, other: Moments, sign: int) -> Moments:
        def added(one: Tensor | None, two: Tensor | None) -> Tensor | None:
            return None if one is None or two is None else torch.add(one, two, alpha=sign)

        return Moments(
            torch.add(self.hessian, other.hessian, alpha=sign),
            self.tokens + sign * other.tokens,
            added(self.cross, other.cross),
            added(self.residual, other.residual),
        )

    def of_rows(self, rows: slice) -> Moments:
        """Return what concerns some rows of the weight."""
        return self if self.residual is None else self._replace(residual=self.residual[rows])

    def mean_hessian(self) -> Tensor:
        """Return E[y yᵀ], trusted as far as there are tokens."""
        return shrunk(self.hessian / self.tokens, self.tokens, damping=0.0)

    def mean_crosses(self) -> tuple[Tensor, Tensor | None]:
        """Return E[x yᵀ] and E[d yᵀ], trusted as the Hessian is."""
        assert self.cross is not None
        trust = self.tokens / (self.tokens + len(self.cross))
        diagonal = self.hessian.diagonal() * ((1 - trust) / self.tokens)
        cross = self.cross * (trust / self.tokens) + torch.diag_embed(diagonal)
        residual = None if self.residual is None else self.residual * (trust / self.tokens)
        return cross, residual


@dataclass(frozen=True)
class Curvature:
    """A Hessian that can be worked with, divided by a unit near the mean of its diagonal.

    :param hessian: H with its damping, (columns, columns), symmetric
    :param root: V of H = V Vᵀ, upper triangular, for columns in the order in which they are rounded
    :param order: that order; None: as they come
    :param added: what was added to the diagonal
    :param unit: a power of two, so that dividing by it is exact
    """

    hessian: Tensor
    root: Tensor
    order: Tensor | None
    added: float
    unit: float

    @cached_property
    def float_root(self) -> Tensor:
        """V in float32; worked out once for all weights with these inputs."""
        return self.root.float()

    @cached_property
    def factor(self) -> Tensor:
        """M of H = M D Mᵀ, unit upper triangular, in float32."""
        return (self.root / self.root.diagonal()).float()


def curvature(hessian: Tensor, damping: float, by_activation: bool = False) -> Curvature | None:
    """Damp a Hessian as far as it takes to factorise it; None where nothing helps.

    :param hessian: E[x xᵀ] in float64
    :param damping: what is added to the diagonal, in terms of its mean; tenfold where that fails
    :param by_activation: whether columns with the largest inputs are rounded first
    """
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    if not 0 < mean < torch.inf:
        return None
    order = torch.argsort(diagonal, descending=True, stable=True) if by_activation else None
    unit = math.ldexp(1.0, math.frexp(mean)[1] - 1)
    while damping <= _LARGEST_DAMPING:
        added = damping * (mean / unit)
        damped = hessian / unit
        damped.diagonal().add_(added)
        ordered = damped if order is None else damped[order][:, order]
        # V is upper triangular: it is found from the last column to the first.
        lower, failed = torch.linalg.cholesky_ex(ordered.flip(0, 1))
        if not int(failed) and bool(torch.isfinite(lower.diagonal()).all()):
            return Curvature(damped.float(), lower.flip(0, 1), order, added, unit)
        damping = max(10 * damping, _LEAST_DAMPING)
    return None


class CurvatureCache:
    """Keeps the latest Hessian factorised: modules with the same input are solved in a row."""

    def __init__(self) -> None:
        self._latest: tuple[object, Tensor, tuple[Curvature | None, Curvature | None]] | None = None

    def of(
        self, sums: HessianSums, regularization: Regularization, ordered: bool
    ) -> tuple[Curvature | None, Curvature | None]:
        """Return what errors of rounding are weighed by, and what corrects for changed inputs.

        The first is None where the Hessian cannot be factorised, the second where no inputs have
        changed.
        """
        hessian = sums.hessians[0]
        key = hessian.data_ptr(), ordered, regularization
        if self._latest is None or self._latest[0] != key:
            mean = Moments(hessian, sums.num_tokens).mean_hessian()
            errors, correction = curvature(mean, regularization.damping, ordered), None
            if errors is not None and sums.crosses is not None:
                correction = curvature(mean, regularization.correction)
            self._latest = key, hessian, (errors, correction)
        return self._latest[2]


def corrected(weight: Tensor, cross: Tensor, residual: Tensor | None, curve: Curvature) -> Tensor:
    """Return the weight that makes of the inputs as they have become what they were meant to give.

    Of ‖W x + d − Ŵ y‖², x before and y after what came earlier was quantized, and d what that has
    lost to which the output is added, the best Ŵ without any rounding: (W (C + λ) + D) (H + λ)⁻¹
    with C = E[x yᵀ], D = E[d yᵀ] and H = E[y yᵀ], damped towards W.

    :param cross: C in float64
    :param residual: D in float64; None where there is nothing to make up for
    """
    original = weight.double()
    wanted = original @ (cross / curve.unit) + original * curve.added
    if residual is not None:
        wanted += residual / curve.unit
    ordered = wanted if curve.order is None else wanted[:, curve.order]
    ordered = torch.linalg.solve_triangular(curve.root.T, ordered, upper=False, left=False)
    ordered = torch.linalg.solve_triangular(curve.root, ordered, upper=True, left=False)
    if curve.order is not None:
        ordered = torch.empty_like(ordered).index_copy_(1, curve.order, ordered)
    return ordered.float()


@torch.no_grad()
def feed_back_errors(
    weight: Tensor,
    curve: Curvature,
    rounding: Rounding,
    scales: Scales | None = None,
    *,
    block: int = 128,
    sweeps: int = 4,
) -> tuple[Tensor, Rounding]:
    """Return what a weight (rows, columns) is rounded to, in float32, and by what.

    :param scales: which scales there can be, of which better ones are taken for the codes; None:
        they stay
    """
    weight, hessian = weight.float(), curve.hessian
    if curve.order is None:
        values = feed_back(weight, curve.factor, rounding, block)
    else:
        in_order = rounding._replace(groups=rounding.groups[curve.order])
        ordered = feed_back(weight[:, curve.order], curve.factor, in_order, block)
        values = torch.empty_like(ordered).index_copy_(1, curve.order, ordered)
    pulls = (values - weight) @ hessian
    plain = rounding.nearest(weight)
    worse = ((values - weight) * pulls).sum(1) > losses(plain - weight, curve)
    values[worse] = plain[worse]
    pulls[worse] = (plain[worse] - weight[worse]) @ hessian
    sweep = partial(descend, sweeps=sweeps, block=block, pulls=pulls)
    values, _ = sweep(values, weight, hessian, rounding)
    if scales is None or not sweeps:
        return values, rounding
    for _ in range(scales.turns):
        before = rounding.scales
        values, rounding = refit_scales(values, pulls, hessian, rounding, scales)
        if torch.equal(before, rounding.scales):
            break
        values, _ = sweep(values, weight, hessian, rounding)
    return values, rounding


def losses(differences: Tensor, curve: Curvature, block: int = 512) -> Tensor:
    """Return Δᵀ H Δ of each row, in the unit of H."""
    ordered = differences if curve.order is None else differences[:, curve.order]
    total = torch.zeros(len(ordered), dtype=torch.float64, device=ordered.device)
    root = curve.float_root
    for start in range(0, ordered.shape[1], block):
        stop = start + block
        total += (ordered[:, :stop] @ root[:stop, start:stop]).double().square().sum(1)
    return total


class Scales(NamedTuple):
    """Which scales there can be.

    :param storable: all positive ones, ascending; None: any
    :param rows: how many rows of the weight share one
    """

    storable: Tensor | None
    rows: int

    @property
    def turns(self) -> int:
        """How often scales move, and then values: where scales are far apart, once is too little.

        Measured: three turns lower what a model loses in NVFP4 by 8 %, and change nothing in int4.
        """
        is_coarse = self.storable is not None and len(self.storable) < _COARSE
        return 3 if is_coarse else 1

    def nearest(self, wanted: Tensor) -> Tensor:
        """Return the nearest ones, with the sign of what is wanted."""
        if self.storable is None:
            return wanted
        storable = self.storable.to(wanted)
        size = wanted.abs()
        above = torch.searchsorted(storable, size).clamp(1, len(storable) - 1)
        low, high = storable[above - 1], storable[above]
        return torch.where(size - low < high - size, low, high) * wanted.sign()

    def shared(self, value: Tensor) -> Tensor:
        """Add up what the rows that share a scale have, and give each of them the sum."""
        if self.rows == 1:
            return value
        which = torch.arange(len(value), device=value.device) // self.rows
        sums = value.new_zeros(int(which[-1]) + 1).index_add_(0, which, value)
        return sums[which]


@torch.no_grad()
def refit_scales(
    values: Tensor, pulls: Tensor, hessian: Tensor, rounding: Rounding, scales: Scales
) -> tuple[Tensor, Rounding]:
    """Move one scale after the other; return the values under them, and how they are rounded.

    :param values: what a weight was rounded to, (rows, columns)
    :param pulls: the product of what they differ by and the Hessian; changed in place to what it
        becomes
    :param hessian: symmetric, (columns, columns)
    :param rounding: by which ``values`` were rounded; columns of a group stand together
    """
    values = values.clone()
    found = rounding.scales.expand(len(values), -1).clone()
    for block in _blocks(rounding.groups):
        columns = slice(block[0].start, block[-1].stop)
        before, near = values[:, columns].clone(), pulls[:, columns].clone()
        for own in block:
            group = int(rounding.groups[own.start])
            here = slice(own.start - columns.start, own.stop - columns.start)
            codes = before[:, here] / found[:, group, None]  # what is multiplied by the scale
            if rounding.zeros is None:
                rounding.fmt.round_(codes)
            else:
                zeros = rounding.zeros[:, group, None]
                rounding.fmt.round_(codes.add_(zeros)).sub_(zeros)
            moved = _moved(found[:, group], codes, near[:, here], hessian[own, own], scales)
            kept = (moved == found[:, group])[:, None]
            values[:, own] = torch.where(kept, before[:, here], codes * moved[:, None])
            found[:, group] = moved
            near += (values[:, own] - before[:, here]) @ hessian[own, columns]
        pulls.addmm_(values[:, columns] - before, hessian[columns])
    return values, rounding._replace(scales=found[: len(rounding.scales)])


def _blocks(groups: Tensor) -> list[list[slice]]:
    """Return the columns of each group, some groups at a time."""
    widths = torch.unique_consecutive(groups, return_counts=True)[1].tolist()
    stops = list(accumulate(widths))
    columns = [slice(stop - width, stop) for stop, width in zip(stops, widths, strict=True)]
    count = max(1, _BLOCK // max(widths, default=1))
    return [columns[start : start + count] for start in range(0, len(columns), count)]


def _moved(now: Tensor, codes: Tensor, pulls: Tensor, hessian: Tensor, scales: Scales) -> Tensor:
    """Return what the scales of a group become, given half the slope of the loss by each value."""
    slopes = scales.shared((pulls * codes).sum(1))
    curves = scales.shared((codes @ hessian * codes).sum(1))
    best = scales.nearest(now - (slopes / curves).nan_to_num(0.0, 0.0, 0.0))
    steps = best - now
    gains = steps * (steps * curves + 2 * slopes) < -LEAST_GAIN * steps * steps * curves
    return torch.where(gains & (best * now > 0), best, now)
