"""What a weight loses: by itself, at the output of its module, and of the loss of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.judging.errors import relative_error
from calipers.judging.streams import Streams
from calipers.kernels.reductions import sum_of_squares
from calipers.kernels.resources import runs
from calipers.kernels.rounding import quantization_errors, quantize_with_error
from calipers.numerics.layout import Layout
from calipers.observers import QParamsDict

_AT_ONCE = 1 << 20  # weights worked on


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
) -> WeightLoss:
    """Return what a weight loses; 0 for a weight of zeros. No copy of it is made.

    Codes are those that a checkpoint gets, whose quotients are rounded to the dtype of the weight.

    :param before: what the weight was before it was rounded otherwise than to the nearest
    :param sensitivity: E[(∂L/∂w)²] of each column

    >>> args = QuantizationArgs(num_bits=4)
    >>> qparams = {"scale": torch.ones(1), "zero_point": torch.zeros(1), "global_scale": None}
    >>> weight = torch.tensor([[3.0, 0.25, -4.0]])
    >>> weight_loss(weight, args, qparams).error == 0.25 / 25.0625**0.5
    True
    >>> weight_loss(weight, args, qparams, Streams(torch.ones(3).double(), None, 1.0)).output
    0.0625
    """
    weight, pieces = weight.detach(), _Pieces.of(weight.detach(), args, qparams)
    if before is not None or (streams is not None and streams.blocks is not None):
        differences = _differences(pieces, weight, before)
        return _summed(differences, weight if before is None else before, streams, sensitivity)
    # Errors of columns count by themselves, and kernels sum them up without keeping them.
    output = None if streams is None else pieces.lost(streams.energies)
    loss = None if sensitivity is None else pieces.lost(sensitivity) / 2
    return WeightLoss(relative_error(pieces.lost(), _energy(weight)), output, loss)


class _Pieces(NamedTuple):
    """A weight cut into pieces that share a scale, as views, with what they are quantized by.

    :param coded: what quotients of values and scales are rounded to when codes are packed
    """

    layout: Layout
    pieces: Tensor
    scale: Tensor
    zero_point: Tensor
    coded: torch.dtype

    @classmethod
    def of(cls, weight: Tensor, args: QuantizationArgs, qparams: QParamsDict) -> _Pieces:
        layout = Layout.of("weight", args)
        pieces, global_scale = layout.pieces(weight), qparams["global_scale"]
        shape = pieces.shape[1:-2]
        scale = qparams["scale"].to(weight.device, torch.promote_types(weight.dtype, torch.float32))
        coded = torch.promote_types(weight.dtype, qparams["scale"].dtype)
        if global_scale is not None:  # it is divided out in its own dtype
            scale, coded = scale / global_scale.to(weight.device), torch.float32
        coded = torch.float32 if coded.itemsize > 4 else coded
        zero_point = qparams["zero_point"].to(weight.device).reshape(shape)
        return cls(layout, pieces, scale.reshape(shape), zero_point, coded)

    def lost(self, energies: Tensor | None = None) -> float:
        """Return Σ e·(q−w)², e the energy of each column; None: 1."""
        _, pieces, scale, zero_point, coded = self
        weights = None if energies is None else self.layout.over_columns(energies)
        args = self.layout.args
        errors = quantization_errors(
            pieces, scale, zero_point, args, weights=weights, working=coded
        )
        return float(errors.sum())

    def tiles(self) -> Iterator[_Pieces]:
        """Cut the pieces, some rows at a time."""
        shape = self.scale.shape
        along = 1 if shape[0] > 1 else -2  # one scale for all: its rows are cut
        each = self.pieces.select(along, 0).numel()
        for part in runs(self.pieces.shape[along], each, _AT_ONCE):
            these = part if along == 1 else slice(None)
            pieces = self.pieces.narrow(along, part.start, part.stop - part.start)
            scale, zero_point = self.scale[these], self.zero_point[these]
            yield self._replace(pieces=pieces, scale=scale, zero_point=zero_point)


def _differences(
    pieces: _Pieces, weight: Tensor, before: Tensor | None
) -> Iterator[tuple[Tensor, float]]:
    """Quantize a weight in tiles; give the rows of ΔW, and ‖ΔW‖² of each tile."""
    working = torch.promote_types(weight.dtype, torch.float32)
    original = weight if before is None else before.detach().to(weight)
    meant = pieces._replace(pieces=pieces.layout.pieces(original))
    for tile, wanted in zip(pieces.tiles(), meant.tiles(), strict=True):
        values, errors = quantize_with_error(
            tile.pieces.to(working),
            tile.scale,
            tile.zero_point,
            pieces.layout.args,
            working=pieces.coded,
        )
        values -= wanted.pieces.to(working)
        energy = errors.sum() if before is None else values.double().square().sum()
        yield _as_rows(values, weight.shape[-1]), float(energy)


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


def _as_rows(pieces: Tensor, columns: int) -> Tensor:
    """Lay pieces of a matrix side by side again; what a block was padded with is left out."""
    if pieces.ndim == 4:  # per tensor: (1, 1, rows, columns)
        return pieces[0, 0]
    whole = pieces[0].transpose(1, 2).flatten(0, 1).flatten(1)
    return whole[:, :columns]
