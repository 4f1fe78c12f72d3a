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

    def start(self, generator: torch.Generator | None = None) -> Tensor:
        """Return no change: the logarithm of what each scale is multiplied by.

        :param generator: draws where between two stored values each begins; all are stored as
            they were
        """
        before = self.before.float()
        dtype = FP8_DTYPE if self._has_fp8_scales else self.before.dtype
        change = (_within_rounding(before, dtype, generator) / before).log1p()
        return change * (self.scale(change) == before)

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

    @property
    def _has_fp8_scales(self) -> bool:
        return Format.of(self.args).scale is ScaleKind.E4M3_GLOBAL

    def _as_stored(self, scale: Tensor) -> Tensor:
        if self._has_fp8_scales:
            top = torch.finfo(FP8_DTYPE).max
            return scale.sign() * scale.abs().clamp(_SMALLEST_FP8, top).to(FP8_DTYPE).float()
        if self.args.scale_dtype is not None:
            scale = scale.to(self.args.scale_dtype).float()
        return scale.to(self.before.dtype).float()


@dataclass(frozen=True)
class Vector:
    """A vector of a norm as a function of what is added to it."""

    before: Tensor

    def start(self, generator: torch.Generator | None = None) -> Tensor:
        """Return no change: what is added, in terms of the root of the mean square.

        :param generator: draws where between two stored values each number begins
        """
        before = self.before.float()
        change = _within_rounding(before, self.before.dtype, generator) / self._unit
        return change * (self.value(change) == before)

    def value(self, change: Tensor) -> Tensor:
        """Return the vector as it is stored, in float32."""
        value = self.before.float() + self._unit * change
        return straight_through(value, lambda x: x.to(self.before.dtype).float())

    @property
    def _unit(self) -> Tensor:
        unit = self.before.float().square().mean().sqrt()
        return torch.where(unit > 0, unit, torch.ones_like(unit))

    def stored(self, change: Tensor) -> Tensor:
        """Return the vector in the dtype in which it is stored."""
        with torch.no_grad():
            return self.value(change).to(self.before.dtype)


def _within_rounding(
    value: Tensor, dtype: torch.dtype, generator: torch.Generator | None
) -> Tensor:
    """Draw what can be added to values without a change to what is stored, but for a few.

    What is stored lies in the middle between two borders. Small steps alike in all values, which
    are those that matter, would all cross them at the same time, after many that change nothing.
    With all on their way, as many cross a border in each step as the step is long.
    """
    if generator is None:
        return torch.zeros_like(value)
    spacing = value.abs().log2().floor().exp2() * torch.finfo(dtype).eps
    drawn = torch.rand(value.shape, generator=generator).to(value.device)
    return (drawn - 0.5) * spacing
