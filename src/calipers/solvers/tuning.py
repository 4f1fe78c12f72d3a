"""What is tuned on a whole model: scales under fixed codes, and vectors such as those of norms.

Each is a function of a change that is 0 at the start. What the function gives is rounded to what
can be stored, and gradients pass through the rounding as if it were not there: a model is trained
with the very values that it will have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from torch import Tensor
from typing_extensions import Self

from calipers.numerics.formats import FP8_DTYPE, Format, ScaleKind
from calipers.numerics.layout import Layout
from calipers.numerics.qparams import fake_quantize, straight_through

_SMALLEST_FP8 = 2.0**-9


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return Σ KL(teacher ‖ student) of logits, (…, words), in nats; rows count alike.

    >>> float(divergence(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])))
    0.0
    """
    wanted = teacher.float().log_softmax(-1)
    log_ratio = wanted - student.float().log_softmax(-1)
    return (wanted.exp() * log_ratio).sum()


def tunes_scales(args: QuantizationArgs) -> bool:
    """Whether the scales of a weight have values between which small steps lead.

    >>> tunes_scales(QuantizationArgs(num_bits=4))
    True
    """
    return Format.of(args).scale is not ScaleKind.POWER_OF_TWO


@dataclass(frozen=True)
class FixedCodes:
    """A weight whose codes stay, as a function of what happens to its scales.

    :param multiples: of the scales, (rows, columns): codes, less zero points
    :param before: the scales before
    :param dtype: that of the weight
    """

    multiples: Tensor
    before: Tensor
    zero_point: Tensor
    global_scale: Tensor | None
    args: QuantizationArgs
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        weight: Tensor,
        args: QuantizationArgs,
        *,
        scale: Tensor,
        zero_point: Tensor,
        global_scale: Tensor | None,
    ) -> Self:
        """Quantize a matrix, bit by bit as compressed-tensors does."""
        codes = quantize(weight, scale, zero_point, args, global_scale=global_scale)
        layout, (rows, columns) = Layout.of("weight", args), weight.shape
        zeros = layout.by_rows(zero_point.float(), rows)
        multiples = codes.float() - zeros[:, layout.groups(columns).to(zeros.device)]
        # Whole numbers to 256 and small floats fit into half the memory.
        small = multiples.bfloat16()
        kept = small if torch.equal(small.float(), multiples) else multiples
        return cls(kept, scale, zero_point, global_scale, args, weight.dtype)

    def start(self) -> Tensor:
        """Return no change: the logarithm of what each scale is multiplied by."""
        return torch.zeros_like(self.before, dtype=torch.float32)

    def scale(self, change: Tensor) -> Tensor:
        """Return the scales as they are stored, in float32."""
        return straight_through(self.before.float() * change.exp(), self._as_stored)

    def weight(self, change: Tensor) -> Tensor:
        """Return the weight in float32."""
        scale = self.scale(change)
        if self.global_scale is not None:
            scale = scale / self.global_scale.float()
        layout, (rows, columns) = Layout.of("weight", self.args), self.multiples.shape
        by_rows = layout.by_rows(scale, rows)
        multiples, groups = self.multiples.float(), by_rows.shape[1]
        if columns % groups:
            return multiples * by_rows[:, layout.groups(columns).to(by_rows.device)]
        # The gradient of a view is a sum; that of an index would be scattered.
        return (multiples.view(rows, groups, -1) * by_rows.unsqueeze(-1)).view(rows, columns)

    def stored(self, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight and scales in the dtypes in which they are stored."""
        with torch.no_grad():
            return self.weight(change).to(self.dtype), self.scale(change).to(self.before.dtype)

    def frozen(self, change: Tensor) -> Tensor:
        """Return what a model computes with that has loaded what is stored."""
        weight, scale = self.stored(change)
        values: Tensor = fake_quantize(
            weight, scale, self.zero_point, self.args, global_scale=self.global_scale
        )
        return values

    def _as_stored(self, scale: Tensor) -> Tensor:
        if Format.of(self.args).scale is ScaleKind.E4M3_GLOBAL:
            top = torch.finfo(FP8_DTYPE).max
            return scale.sign() * scale.abs().clamp(_SMALLEST_FP8, top).to(FP8_DTYPE).float()
        if self.args.scale_dtype is not None:
            scale = scale.to(self.args.scale_dtype).float()
        return scale.to(self.before.dtype).float()


@dataclass(frozen=True)
class Vector:
    """A vector of a norm as a function of what is added to it."""

    before: Tensor

    def start(self) -> Tensor:
        """Return no change: what is added, in terms of the root of the mean square."""
        return torch.zeros_like(self.before, dtype=torch.float32)

    def value(self, change: Tensor) -> Tensor:
        """Return the vector as it is stored, in float32."""
        before = self.before.float()
        unit = before.square().mean().sqrt()
        unit = torch.where(unit > 0, unit, torch.ones_like(unit))
        return straight_through(before + unit * change, lambda x: x.to(self.before.dtype).float())

    def stored(self, change: Tensor) -> Tensor:
        """Return the vector in the dtype in which it is stored."""
        with torch.no_grad():
            return self.value(change).to(self.before.dtype)
