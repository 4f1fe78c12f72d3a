"""Error feedback (GPTQ): a weight is rounded so that its errors make up for each other.

What the output of a row loses is Δᵀ H Δ, Δ = q − w, with H = E[x xᵀ] of its inputs. Columns are
rounded one after the other, each with the errors of those before it; then every value moves to the
best code that all others leave it, and scales to what is best for the codes, in turns. Rounding to
nearest is the fallback of each row: no row loses more than with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from calipers.kernels.feedback import Rounding, descend, feed_back
from calipers.solvers.refit import Scales, refit_scales

_LEAST_DAMPING, _LARGEST_DAMPING = 1e-10, 1.0  # that are tried, of the mean of the diagonal


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


def corrected(weight: Tensor, cross: Tensor, residual: Tensor | None, curve: Curvature) -> Tensor:
    """Return the weight that makes of the inputs as they have become what they were meant to give.

    Of ‖W x + d − Ŵ y‖², x before and y after what came earlier was quantized, and d what that has
    lost to which the output is added, the best Ŵ without any rounding: (W (C + λ) + D) (H + λ)⁻¹
    with C = E[x yᵀ], D = E[d yᵀ] and H = E[y yᵀ], damped towards W.

    :param cross: C in float64
    :param residual: D in float64; None where there is nothing to make up for
    """
    given = weight.double()
    wanted = given @ (cross / curve.unit) + given * curve.added
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
    values = _fed_back(weight, curve, rounding, block)
    pulls = (values - weight) @ hessian
    plain = rounding.nearest(weight)
    worse = ((values - weight) * pulls).sum(1) > losses(plain - weight, curve)
    values[worse] = plain[worse]
    pulls[worse] = (plain[worse] - weight[worse]) @ hessian
    sweep = partial(descend, sweeps=sweeps, block=block, pulls=pulls)
    values, _ = sweep(values, weight, hessian, *rounding)
    if scales is None or not sweeps:
        return values, rounding
    for _ in range(scales.turns):
        before = rounding.scales
        values, rounding = refit_scales(values, pulls, hessian, rounding, scales)
        if torch.equal(before, rounding.scales):
            break
        values, _ = sweep(values, weight, hessian, *rounding)
    return values, rounding


def _fed_back(weight: Tensor, curve: Curvature, rounding: Rounding, block: int) -> Tensor:
    if curve.order is None:
        return feed_back(weight, curve.factor, *rounding, block=block)
    ordered = feed_back(
        weight[:, curve.order], curve.factor, *rounding.permuted(curve.order), block=block
    )
    return torch.empty_like(ordered).index_copy_(1, curve.order, ordered)


def losses(differences: Tensor, curve: Curvature, block: int = 512) -> Tensor:
    """Return Δᵀ H Δ of each row, in the unit of H."""
    ordered = differences if curve.order is None else differences[:, curve.order]
    total = torch.zeros(len(ordered), dtype=torch.float64, device=ordered.device)
    root = curve.float_root
    for start in range(0, ordered.shape[1], block):
        stop = start + block
        total += (ordered[:, :stop] @ root[:stop, start:stop]).double().square().sum(1)
    return total
