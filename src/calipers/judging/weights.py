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
from calipers.kernels.moments import sum_of_squares
from calipers.kernels.quantize import quantization_errors, quantize_with_error
from calipers.kernels.tiles import runs
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


class _Judge:
    """Sums up what the differences of a weight cost, some rows at a time."""

    def __init__(self, streams: Streams | None, sensitivity: Tensor | None = None) -> None:
        self._streams, self._sensitivity = streams, sensitivity
        self.energy, self._output, self._loss = 0.0, 0.0, 0.0

    def add(self, differences: Tensor) -> None:
        """Take in rows of ΔW, except for their own energy."""
        if self._streams is not None:
            self._output += self._streams.energy_through(differences)
        if self._sensitivity is not None:
            self._loss += _predicted_loss(differences, self._streams, self._sensitivity)

    def loss(self, whole: float) -> WeightLoss:
        """Return what was lost of a weight with the energy ‖W‖²."""
        return WeightLoss(
            relative_error(self.energy, whole),
            None if self._streams is None else self._output,
            None if self._sensitivity is None else self._loss,
        )


def weight_loss(
    weight: Tensor,
    args: QuantizationArgs,
    qparams: QParamsDict,
    streams: Streams | None = None,
    before: Tensor | None = None,
    sensitivity: Tensor | None = None,
) -> WeightLoss:
    """Return what a weight loses; 0 for a weight of zeros. Works in tiles, without a copy.

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
    weight, judge = weight.detach(), _Judge(streams, sensitivity)
    working, coded = torch.promote_types(weight.dtype, torch.float32), _coded_in(weight, qparams)
    meant = weight if before is None else before.detach()
    # Only errors count, which kernels find as it lies.
    is_plain = streams is None and before is None and sensitivity is None
    at_once = weight.numel() if is_plain else _AT_ONCE
    for tile, wanted, scale, zero_point in _tiles(weight, meant, args, qparams, at_once):
        if is_plain:
            errors = quantization_errors(tile, scale, zero_point, args, working=coded)
            judge.energy += float(errors.sum())
            continue
        values, errors = quantize_with_error(
            tile.to(working), scale, zero_point, args, working=coded
        )
        values -= wanted.to(working)
        judge.energy += float(errors.sum() if before is None else values.double().square().sum())
        judge.add(_as_rows(values, weight.shape[-1]))
    return judge.loss(_energy(meant))


def stored_weight_loss(
    parts: Iterable[tuple[Tensor, Tensor]], streams: Streams | None = None
) -> WeightLoss:
    """Return what a weight has lost in a checkpoint, from pairs of its rows: original and stored.

    Infinite where something that is stored is not finite.

    >>> original, stored = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.5]])
    >>> stored_weight_loss([(original, stored)])
    WeightLoss(error=0.1, output=None, loss=None)
    """
    judge, whole = _Judge(streams), 0.0
    for original, stored in parts:
        differences = stored.float() - original.float()
        judge.energy += _energy(differences)
        whole += _energy(original)
        judge.add(differences)
    if not math.isfinite(judge.energy) or (judge.energy and not whole):
        return WeightLoss(math.inf)
    return judge.loss(whole)


def _energy(weight: Tensor) -> float:
    return float(sum_of_squares(weight.reshape(-1, weight.shape[-1])).sum())


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


def _coded_in(weight: Tensor, qparams: QParamsDict) -> torch.dtype:
    """Return what quotients of values and scales are rounded to when codes are packed."""
    if qparams["global_scale"] is not None:
        return torch.float32  # it is divided out in its own dtype
    found = torch.promote_types(weight.dtype, qparams["scale"].dtype)
    return torch.float32 if found.itemsize > 4 else found


def _tiles(
    weight: Tensor, meant: Tensor, args: QuantizationArgs, qparams: QParamsDict, at_once: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Cut a weight and what was meant into pieces, some rows at a time, with their parameters.

    These are views. Whoever needs more digits than they have widens them: a copy of a weight in
    float32 takes longer than its errors, which kernels find in any dtype.
    """
    working = torch.promote_types(weight.dtype, torch.float32)
    layout = Layout.of("weight", args)
    pieces, wanted = layout.pieces(weight), layout.pieces(meant.to(weight))
    shape = pieces.shape[1:-2]
    scale = qparams["scale"].to(weight.device, working)
    if qparams["global_scale"] is not None:
        scale = scale / qparams["global_scale"].to(weight.device)
    scale, zeros = scale.reshape(shape), qparams["zero_point"].to(weight.device).reshape(shape)
    along = 1 if shape[0] > 1 else -2  # one scale for all: its rows are cut
    each = pieces.select(along, 0).numel()
    for part in runs(pieces.shape[along], each, at_once):
        length = part.stop - part.start
        tile, goal = (whole.narrow(along, part.start, length) for whole in (pieces, wanted))
        these = part if along == 1 else slice(None)
        yield tile, goal, scale[these], zeros[these]


def _as_rows(pieces: Tensor, columns: int) -> Tensor:
    """Lay pieces of a matrix side by side again; what a block was padded with is left out."""
    if pieces.ndim == 4:  # per tensor: (1, 1, rows, columns)
        return pieces[0, 0]
    whole = pieces[0].transpose(1, 2).flatten(0, 1).flatten(1)
    return whole[:, :columns]
