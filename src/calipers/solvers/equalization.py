"""By how much each channel between two modules is divided, so that both are easier to quantize.

Pure functions: the model computes the same whatever the factors are, as long as whoever reads a
channel multiplies by its factor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.reductions import sum_of_products, sum_of_squares
from calipers.numerics.layout import shared_columns, strategy_name

LEAST = 1e-5
"""The least factor of SmoothQuant."""
_LEAST_OF_AWQ = 1e-4


def smoothing_factors(ranges: Tensor, magnitudes: Tensor, strength: float) -> Tensor:
    """Return the factors of SmoothQuant: rangeᵅ / (2·max|w|)¹⁻ᵅ (Xiao et al. 2022).

    :param ranges: max − min of each channel
    :param magnitudes: max|w| of the columns that read it

    >>> smoothing_factors(torch.tensor([16.0, 1.0]), torch.tensor([0.5, 0.0]), 0.5).tolist()
    [4.0, 1.0]
    """
    doubled = 2 * magnitudes
    factors = ranges**strength / doubled ** (1 - strength)
    # A channel that nobody reads has its range taken away alone.
    factors = torch.where(doubled > 0, factors, ranges).clamp(min=LEAST)
    return torch.where(ranges > 0, factors, 1.0)  # of one that never moved nothing is known


def logarithmic_factors(ranges: Tensor) -> Tensor:
    """Return the factors of logarithmic equalization: r / log2(2 + r) (Li et al. 2023).

    >>> logarithmic_factors(torch.tensor([2.0, 14.0])).tolist()
    [1.0, 3.5]
    """
    factors = (ranges / torch.log2(2 + ranges)).clamp(min=LEAST)
    return torch.where(ranges > 0, factors, 1.0)


def mean_magnitudes(weights: Iterable[tuple[Tensor, QuantizationArgs]], channels: int) -> Tensor:
    """Return the mean of |w| of each column, over the largest |w| of those it shares a scale with.

    :param weights: matrices that read the same channels, and how they are quantized
    """
    total, rows = torch.zeros(channels, dtype=torch.float64), 0
    for weight, args in weights:
        magnitude = weight.detach().float().abs()
        width = shared_columns(args) or channels
        if channels % width:
            width = channels
        pieces = magnitude.reshape(len(magnitude), -1, width)
        over = (0, 1, 2) if strategy_name(args) == "tensor" else (2,)
        relative = pieces / (pieces.amax(over, keepdim=True) + 1e-6)
        total += relative.double().sum(0).reshape(-1).cpu()
        rows += len(magnitude)
    return total / max(1, rows)


class Strength(NamedTuple):
    """A candidate of AWQ.

    :param ratio: how much the magnitude of a channel counts
    :param uses_weights: whether the magnitudes of its columns count, too
    """

    ratio: float
    uses_weights: bool


def strengths(count: int, duo_scaling: bool | Literal["both"]) -> list[Strength]:
    """Return the candidates of AWQ; one of them changes nothing.

    >>> strengths(4, True)
    [Strength(ratio=0.0, uses_weights=False), Strength(ratio=0.0, uses_weights=True), \
Strength(ratio=0.5, uses_weights=True), Strength(ratio=1.0, uses_weights=True)]
    """
    if duo_scaling == "both":
        half = count // 2
        grid = [index / max(1, half - 1) for index in range(half)]
        return [Strength(ratio, uses) for ratio in grid for uses in (False, True)]
    if duo_scaling:
        rest = count - 1
        grid = [index / max(1, rest - 1) for index in range(rest)]
        return [Strength(0.0, False), *(Strength(ratio, True) for ratio in grid)]
    return [Strength(index / max(1, count - 1), False) for index in range(count)]


def awq_factors(activations: Tensor, weights: Tensor, strength: Strength) -> Tensor:
    """Return the factors of AWQ: xʳ, or xʳ / w¹⁻ʳ, around 1 (Lin et al. 2023).

    :param activations: the magnitude of each channel
    :param weights: that of the columns that read it

    >>> awq_factors(torch.tensor([4.0, 0.25]), torch.ones(2), Strength(0.5, False)).tolist()
    [2.0, 0.5]
    """
    factors = activations.double() ** strength.ratio
    if strength.uses_weights:
        factors = factors / (weights.double() ** (1 - strength.ratio) + 1e-4)
    factors = factors.clamp(min=_LEAST_OF_AWQ)
    factors = factors / (factors.max() * factors.min()).sqrt()
    # Of a channel that was always zero nothing is known.
    return torch.where(torch.isfinite(factors) & (activations > 0), factors, 1.0)


def output_energy(error: Tensor, sums: Tensor) -> float:
    """Return Σ‖E x‖² over the tokens behind sums, for the error E of a weight.

    :param sums: Σx² of each channel, or Σ x xᵀ in blocks along the diagonal

    >>> output_energy(torch.tensor([[1.0, 2.0]]), torch.tensor([3.0, 1.0]))
    7.0
    >>> output_energy(torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 1.0], [1.0, 1.0]]]))
    11.0
    """
    if sums.ndim == 1:
        return float((sum_of_squares(error) * sums.to(error.device)).sum())
    parts = torch.split(error, sums.shape[-1], dim=1)
    pairs: Sequence[tuple[Tensor, Tensor]] = list(zip(sums, parts, strict=True))
    return sum(
        float((sum_of_products(part) * block.to(part.device)).sum()) for block, part in pairs
    )


def storable_factors(weight: Tensor, factors: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """Return what a norm stores when its gain is divided by factors, and the factors it then has.

    The gain is rounded to the dtype of the norm; what it was divided by is worked out again from
    that, so that columns make up for it, and the rounding changes nothing.

    :param offset: what the norm adds to its weight
    """
    wide = weight.detach().double()
    gain = wide + offset
    stored = (gain / factors.to(gain) - offset).to(weight.dtype)
    left = stored.double() + offset
    divided = torch.where(gain == 0, factors.to(gain), gain / left)
    is_lost = (left == 0) & (gain != 0)  # 1 + weight of a coarse weight near -1
    return torch.where(is_lost, weight, stored), torch.where(is_lost, 1.0, divided)
