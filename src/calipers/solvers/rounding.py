"""Learned rounding: codes and scales that gradients of any loss move, as for whole layers.

A weight is described by the position of each value in the ascending list of numbers of its format,
and by its scales. Both move continuously, and the weight is computed from the nearest code and the
nearest storable scale. Where these are flat, gradients pass straight through: to positions with
the slope of the line through the neighbouring numbers, to scales as they are. Positions are the
same for all formats: a step is always one code, however far apart the numbers are.

AutoRound moves rounding offsets by the sign of the gradient, by steps that begin large enough to
flip every code. From weights that error feedback has found, that only adds noise: each flip is an
improvement by itself, thousands of them at once are none. Adam's steps shrink where gradients of
mini-batches disagree, and codes start in the middle of their cells, half a step from any change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calipers.kernels.hessian import Rounding
from calipers.numerics.formats import ScaleKind
from calipers.solvers.gptq import Scales

_FIRST, _SECOND, _LEAST = 0.9, 0.99, 1e-12  # Adam: decay of both moments, and what is added
_FARTHEST = 1.0  # codes that a position may move
_NARROWEST, _WIDEST = 0.5, 2.0  # of the scale that there was


class RelaxedWeight(NamedTuple):
    """A quantized weight (rows, columns) whose codes and scales can move.

    :param positions: the position of each value in ``numbers``, where it starts
    :param numbers: those of the format, ascending
    :param rounding: by which it was rounded
    :param scales: which scales there can be
    """

    positions: Tensor
    numbers: Tensor
    rounding: Rounding
    scales: Scales

    @classmethod
    def of(cls, values: Tensor, rounding: Rounding, scales: Scales) -> RelaxedWeight:
        """Start from what a weight was rounded to."""
        numbers = rounding.fmt.values().to(values.device)
        codes = values.float() / rounding.scales[:, rounding.groups]
        if rounding.zeros is not None:
            codes += rounding.zeros[:, rounding.groups]
        codes = rounding.fmt.round_(codes.clamp_(*rounding.fmt.limits))
        positions = torch.searchsorted(numbers, codes).clamp_(max=len(numbers) - 1)
        return cls(positions.float(), numbers, rounding, scales)

    @property
    def moves_scales(self) -> bool:
        """Whether scales move; powers of two are too far apart."""
        return self.rounding.fmt.scale is not ScaleKind.POWER_OF_TWO

    def offsets(self) -> Offsets:
        """Return offsets of zero, which require gradients."""
        distinct = self.rounding.scales[:: self.scales.rows]
        return Offsets(
            torch.zeros_like(self.positions).requires_grad_(),
            torch.zeros_like(distinct).requires_grad_(self.moves_scales),
        )

    def weight(self, offsets: Offsets) -> Tensor:
        """Return the weight under offsets, in float32, as it is stored."""
        scales = self.moved_scales(offsets)
        codes: Tensor = _NearestNumber.apply(self.positions + offsets.codes, self.numbers)  # type: ignore[no-untyped-call]
        if self.rounding.zeros is not None:
            codes = codes - self.rounding.zeros[:, self.rounding.groups]
        return codes * scales[:, self.rounding.groups]

    def moved_scales(self, offsets: Offsets) -> Tensor:
        """Return the scales under offsets, in the form of those of the rounding."""
        before = self.rounding.scales
        if not self.moves_scales:
            return before
        wanted = before[:: self.scales.rows] * (1 + offsets.scales)
        scales: Tensor = _NearestScale.apply(wanted, self.scales)  # type: ignore[no-untyped-call]
        if len(scales) == len(before):
            return scales
        return scales.repeat_interleave(self.scales.rows, 0)[: len(before)]

    @torch.no_grad()
    def confine_(self, offsets: Offsets) -> None:
        """Keep codes beside where they started and within the format, and scales near theirs."""
        offsets.codes.clamp_(-_FARTHEST, _FARTHEST)
        torch.maximum(offsets.codes, -self.positions, out=offsets.codes)
        torch.minimum(offsets.codes, len(self.numbers) - 1 - self.positions, out=offsets.codes)
        offsets.scales.clamp_(_NARROWEST - 1, _WIDEST - 1)


class Offsets(NamedTuple):
    """How far a weight has moved.

    :param codes: by how many codes each position, (rows, columns)
    :param scales: by which part of itself each scale, (rows of distinct scales, groups)
    """

    codes: Tensor
    scales: Tensor


class _NearestNumber(torch.autograd.Function):
    """The number at the nearest position; its gradient is that of the line through all numbers."""

    @staticmethod
    def forward(ctx: Any, positions: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(positions, numbers)
        return numbers[_indices(positions.round(), numbers)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        positions, numbers = ctx.saved_tensors
        below = _indices(positions.ceil() - 1, numbers)
        above = _indices(positions.floor() + 1, numbers)
        # On a number, the mean of the slopes on both sides; between two, that of the line.
        slopes = (numbers[above] - numbers[below]) / (above - below).clamp(min=1)
        return gradients[0] * slopes, None


def _indices(positions: Tensor, numbers: Tensor) -> Tensor:
    return positions.long().clamp_(0, len(numbers) - 1)


class _NearestScale(torch.autograd.Function):
    """The nearest storable scale, whose gradient is that of the scale that is wanted."""

    @staticmethod
    def forward(_: Any, wanted: Tensor, scales: Scales) -> Tensor:
        return scales.nearest(wanted)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Adam:
    """Adam for tensors that are changed in place.

    A tensor without any gradient so far, as of an expert that no token has reached, stays as it is.
    """

    def __init__(self, parameters: Sequence[Tensor], rates: Sequence[float]) -> None:
        self._parameters, self._rates, self._steps = parameters, rates, 0
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], fraction: float = 1.0) -> None:
        """Move by gradients.

        :param fraction: of the rates
        """
        self._steps += 1
        unbiased = [1 - decay**self._steps for decay in (_FIRST, _SECOND)]
        moves = zip(self._parameters, self._moments, gradients, self._rates, strict=True)
        for parameter, (mean, square), gradient, rate in moves:
            mean.lerp_(gradient, 1 - _FIRST)
            square.mul_(_SECOND).addcmul_(gradient, gradient, value=1 - _SECOND)
            size = (square / unbiased[1]).sqrt_().add_(_LEAST)
            parameter.addcdiv_(mean, size, value=-rate * fraction / unbiased[0])


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of \u2016output \u2212 target\u2016\u00b2 over tokens (tokens, width).

    >>> squared_error(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]]))
    tensor(5.)
    """
    return (outputs.float() - targets.float()).square().sum()
