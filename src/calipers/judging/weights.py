"""What a weight loses: by itself, at the output of its module, and of the loss of the model.

docs/judging.md has the formulas side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.reductions import sum_of_products, sum_of_squares
from calipers.kernels.rounding import Packed, pack_weight
from calipers.numerics.layout import row_tiles, scale_rows
from calipers.observers import QParamsDict
from calipers.statistics.base import Statistic
from calipers.statistics.sums import BlockHessians, SquareSums, TokenSquares

_AT_ONCE = 1 << 20  # weights worked on


def relative_error(lost: float, whole: float) -> float:
    """Return ‖error‖ / ‖whole‖ from sums of squares; 0 where there is nothing to lose.

    >>> relative_error(0.01, 1.0)
    0.1
    """
    return math.sqrt(lost / whole) if whole else 0.0


class Streams(NamedTuple):
    """What went through a module, on average over tokens.

    :param energies: E[x²] of each input channel
    :param blocks: E[x xᵀ] of blocks of channels, if that was gathered
    :param output: E‖y‖²; where outputs were not measured, what inputs and weight tell of it
    """

    energies: Tensor
    blocks: Tensor | None
    output: float

    @classmethod
    def of(
        cls, inputs: Statistic | None, outputs: Statistic | None, weight: Tensor
    ) -> Streams | None:
        """Read statistics of inputs and outputs; None where there is nothing to be read."""
        before, after = _moments(inputs), _moments(outputs)
        if before is None:
            return None
        energies, blocks = before
        streams = cls(energies, blocks, math.nan)
        total = streams.energy_through(weight) if after is None else float(after[0].sum())
        sound = bool(torch.isfinite(energies).all()) and 0 < total < math.inf
        return streams._replace(output=total) if sound else None

    def energy_through(self, matrix: Tensor) -> float:
        """Return E‖M x‖² of a matrix M.

        With the whole of E[x xᵀ] that is exact. With blocks of it, or its diagonal alone, what
        channels of different blocks have in common is left out: it averages out where M is an error
        of rounding, whose entries are independent with a mean of about zero.
        """
        if self.blocks is None:
            return float((sum_of_squares(matrix).cpu() * self.energies).sum())
        # tr(M H Mᵀ) = Σ H ∘ MᵀM, which takes half the products
        parts = torch.split(matrix, self.blocks.shape[-1], dim=1)
        pairs = zip(self.blocks, parts, strict=True)
        return sum(float((sum_of_products(part).cpu() * block).sum()) for block, part in pairs)


def _moments(seen: Statistic | None) -> tuple[Tensor, Tensor | None] | None:
    """Return E[x²] of each channel and, where they were gathered, blocks of E[x xᵀ]."""
    held = {} if seen is None else seen.fields()
    for kind in (SquareSums, BlockHessians, TokenSquares):
        sums, count = kind.reductions
        if sums in held and count in held and int(held[count]):
            mean = held[sums].double().cpu() / int(held[count])
            is_diagonal = mean.ndim == 1
            return (mean, None) if is_diagonal else (mean.diagonal(0, -2, -1).flatten(), mean)
    return None


class WeightLoss(NamedTuple):
    """What a weight loses.

    :param error: ‖Q(W) − W‖ / ‖W‖
    :param output: E‖ΔW x‖², if it is known what went through the module
    :param loss: what the loss of the model gains, in nats per token, if it is known how sensitive
        that is
    """

    error: float
    output: float | None = None
    loss: float | None = None


def weight_loss(
    weight: Tensor,
    args: QuantizationArgs,
    qparams: QParamsDict,
    streams: Streams | None = None,
    before: Tensor | None = None,
    sensitivity: Tensor | None = None,
    form: CompressionFormat | None = None,
) -> tuple[WeightLoss, Tensor | None]:
    """Quantize a weight; return what it loses, 0 for a weight of zeros, and its codes.

    Codes are those of a checkpoint, whose quotients are rounded to the dtype of the weight.

    :param before: what the weight was before it was rounded otherwise than to the nearest
    :param sensitivity: E[(∂L/∂w)²] of each column
    :param form: how codes are stored; None: they are not wanted

    >>> args = QuantizationArgs(num_bits=4, strategy="channel")
    >>> qparams = {"scale": torch.ones(1, 1), "zero_point": torch.zeros(1, 1), "global_scale": None}
    >>> weight = torch.tensor([[3.0, 0.25, -4.0]])
    >>> loss, _ = weight_loss(weight, args, qparams, Streams(torch.ones(3).double(), None, 1.0))
    >>> loss.error == 0.25 / 25.0625**0.5, loss.output
    (True, 0.0625)
    """
    weight = weight.detach()
    if before is None and (streams is None or streams.blocks is None):
        # Errors of columns count by themselves: differences need not be kept.
        packed = _packed(weight, args, qparams, form)
        columns = packed.errors.cpu()
        loss = WeightLoss(
            relative_error(float(columns.sum()), _energy(weight)),
            None if streams is None else float((columns * streams.energies).sum()),
            None if sensitivity is None else float((columns * sensitivity.cpu()).sum()) / 2,
        )
        return loss, packed.codes
    original = weight if before is None else before.detach().to(weight)
    codes: list[Tensor] = []

    def differences() -> Iterator[tuple[Tensor, float]]:
        for rows in row_tiles(weight.shape, args, _AT_ONCE):
            packed = _packed(weight[rows], args, qparams, form, rows)
            assert packed.values is not None
            if packed.codes is not None:
                codes.append(packed.codes)
            values = packed.values.sub_(original[rows])
            energy = packed.errors if before is None else values.double().square()
            yield values, float(energy.sum())

    loss = _summed(differences(), original, streams, sensitivity)
    return loss, torch.cat(codes) if codes else None


def _packed(
    weight: Tensor,
    args: QuantizationArgs,
    qparams: QParamsDict,
    form: CompressionFormat | None,
    rows: slice | None = None,
) -> Packed:
    """Pack a weight, or some rows of it; of those, with the values that codes stand for."""
    scale, zero_point = (qparams[key].to(weight.device) for key in ("scale", "zero_point"))
    global_scale = qparams["global_scale"]
    if rows is not None:
        scale, zero_point = (scale_rows(value, rows, args) for value in (scale, zero_point))
    return pack_weight(
        weight,
        scale.to(weight.dtype),  # as the module holds it
        zero_point,
        None if global_scale is None else global_scale.to(weight.device),
        args,
        form,
        with_values=rows is not None,
    )


def stored_weight_loss(
    parts: Iterable[tuple[Tensor, Tensor]], original: Tensor, streams: Streams | None = None
) -> WeightLoss:
    """Return what a weight has lost in a checkpoint. Infinite where something is not finite.

    :param parts: pairs of its rows: original and stored

    >>> original, stored = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])
    >>> stored_weight_loss([(original, stored)], original)
    WeightLoss(error=0.1, output=None, loss=None)
    """
    differences = (stored.float() - rows.float() for rows, stored in parts)
    return _summed(((rows, _energy(rows)) for rows in differences), original, streams)


def _summed(
    differences: Iterable[tuple[Tensor, float]],
    original: Tensor,
    streams: Streams | None,
    sensitivity: Tensor | None = None,
) -> WeightLoss:
    """Sum up what differences cost, which come as rows with their energy."""
    energy = output = loss = 0.0
    for rows, lost in differences:
        energy += lost
        output += 0.0 if streams is None else streams.energy_through(rows)
        loss += 0.0 if sensitivity is None else _predicted_loss(rows, streams, sensitivity)
    whole = _energy(original)
    if not math.isfinite(energy) or (energy and not whole):
        return WeightLoss(math.inf)
    return WeightLoss(
        relative_error(energy, whole),
        None if streams is None else output,
        None if sensitivity is None else loss,
    )


def _energy(weight: Tensor) -> float:
    return float(sum_of_squares(weight.detach().reshape(-1, weight.shape[-1])).sum())


def _predicted_loss(errors: Tensor, streams: Streams | None, sensitivity: Tensor) -> float:
    """Return ½ Σ Δᵀ F Δ over the rows Δ of the errors of a weight.

    That is the second term of the Taylor series of the loss around the trained weights, hence the
    ½; the first one, the gradient times Δ, averages out over errors without a direction of their
    own. The Fisher information F stands for the second derivatives: the two agree on average where
    the model predicts the data well.

    The diagonal of F is the sensitivity, E[(∂L/∂w)²]. Off it, the gradients of two columns of a row
    go together as far as their inputs do, since ∂L/∂w = g·x. For independent errors that averages
    out. GPTQ makes larger errors that cancel in the output, of which the diagonal alone would
    predict two to three times the loss.
    """
    if streams is None or streams.blocks is None:
        return float((sum_of_squares(errors).cpu() * sensitivity).sum()) / 2
    gains = torch.where(streams.energies > 0, sensitivity / streams.energies, 0.0).sqrt()
    return streams.energy_through(errors * gains.to(errors)) / 2
