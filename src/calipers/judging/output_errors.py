"""How far the output of a module is off, by its weight and by its input, from statistics alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.judging.costs import ActivationCost, ModuleCosts, relative
from calipers.kernels.moments import sum_of_squares
from calipers.kernels.products import sum_of_products
from calipers.kernels.quantize import quantization_errors, quantize_with_error
from calipers.kernels.tiles import runs
from calipers.numerics.layout import Layout
from calipers.observers import QParamsDict
from calipers.statistics.base import Statistic
from calipers.statistics.hessian import BlockHessians
from calipers.statistics.moments import SquareSums, TokenSquares

_AT_ONCE = 1 << 20  # weights worked on


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
        made = cls(energies, blocks, math.nan)
        total = made.energy_through(weight) if after is None else float(after[0].sum())
        sound = bool(torch.isfinite(energies).all()) and 0 < total < math.inf
        return made._replace(output=total) if sound else None

    def energy_through(self, matrix: Tensor) -> float:
        """Return E‖M x‖² of a matrix M: errors of channels, or blocks, are independent."""
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
            return (mean, None) if mean.ndim == 1 else (_diagonal(mean), mean)
    return None


def _diagonal(blocks: Tensor) -> Tensor:
    return blocks.diagonal(dim1=-2, dim2=-1).flatten()


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
    """Return what a weight loses; 0 for a weight of zeros. Works in tiles, without a copy.

    Codes are those that a checkpoint gets, whose quotients are rounded to the dtype of the weight.

    :param before: what the weight was before it was rounded otherwise than to the nearest
    :param sensitivity: E[(∂L/∂w)²] of each column

    >>> args = QuantizationArgs(num_bits=4)
    >>> found = {"scale": torch.ones(1), "zero_point": torch.zeros(1), "global_scale": None}
    >>> weight = torch.tensor([[3.0, 0.25, -4.0]])
    >>> weight_loss(weight, args, found).error == 0.25 / 25.0625**0.5
    True
    >>> weight_loss(weight, args, found, Streams(torch.ones(3).double(), None, 1.0)).output
    0.0625
    """
    weight, error, output, loss = weight.detach(), 0.0, 0.0, 0.0
    working, coded = torch.promote_types(weight.dtype, torch.float32), _coded_in(weight, qparams)
    meant = weight if before is None else before.detach()
    # Only errors count, which kernels find as it lies.
    is_plain = streams is None and before is None and sensitivity is None
    at_once = weight.numel() if is_plain else _AT_ONCE
    for tile, wanted, scale, zero_point in _tiles(weight, meant, args, qparams, at_once):
        if is_plain:
            found = quantization_errors(tile, scale, zero_point, args, working=coded)
            error += float(found.sum())
            continue
        values, errors = quantize_with_error(
            tile.to(working), scale, zero_point, args, working=coded
        )
        values -= wanted.to(working)
        error += float(errors.sum() if before is None else values.double().square().sum())
        rows = _as_rows(values, weight.shape[-1])
        if streams is not None:
            output += streams.energy_through(rows)
        if sensitivity is not None:
            loss += _predicted_loss(rows, streams, sensitivity)
    norm = math.sqrt(float(sum_of_squares(meant.reshape(-1, meant.shape[-1])).sum()))
    return WeightLoss(
        math.sqrt(error) / norm if norm else 0.0,
        None if streams is None else output,
        None if sensitivity is None else loss,
    )


def _predicted_loss(errors: Tensor, streams: Streams | None, sensitivity: Tensor) -> float:
    """Return ½ Σ Δᵀ F Δ over the rows Δ of the errors of a weight.

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


def module_costs(
    weight: Tensor,
    loss: WeightLoss,
    streams: Streams | None,
    tensors: dict[str, ActivationCost],
) -> ModuleCosts:
    """Return what the output of a module loses by its weight, and by its static input."""
    if streams is None or loss.output is None:
        return ModuleCosts(tensors=tensors, loss=loss.loss)
    by_weight = relative(loss.output, streams.output)
    seen = tensors.get("input")
    if seen is None:
        return ModuleCosts(by_weight, tensors=tensors, loss=loss.loss)
    columns = sum_of_squares(weight.detach()).cpu()
    return ModuleCosts(by_weight, *_input_errors(seen, streams, columns), tensors, loss.loss)


def _input_errors(
    seen: ActivationCost, streams: Streams, columns: Tensor
) -> tuple[float, float | None]:
    """Return the error of the output by that of the input: of all values, and of typical ones.

    :param columns: Σw² of each column of the weight
    """
    x = streams.energies
    total = float(x.sum())
    alone = float((columns * x).sum())  # E‖y‖² if channels were independent of each other
    if not alone:
        return 0.0, 0.0
    gain = streams.output / alone
    error = seen.error**2 * total
    in_largest = _concentrated(error * seen.error_in_largest, x)
    elsewhere = error * (1 - seen.error_in_largest)
    lost = in_largest + _spread(elsewhere, x - in_largest)
    whole = relative(_passed_on(lost, x, columns, gain), streams.output)
    if not seen.typical_error:
        return whole, 0.0
    usual = x - _concentrated(total - elsewhere / seen.typical_error**2, x)
    lost = _spread(elsewhere, usual)
    return whole, relative(
        _passed_on(lost, usual, columns, gain), gain * float((columns * usual).sum())
    )


def _passed_on(lost: Tensor, x: Tensor, columns: Tensor, gain: float) -> float:
    """Return the energy at the output of what channels of energy ``x`` lose.

    The best that a coarse grid can keep of a channel is (1−f)·x, f the share that is lost: f² of
    its energy is then missing, and goes together with other channels as the signal does; the rest,
    f·(1−f), is noise.
    """
    share = torch.where(x > 0, lost / x, 0.0).clamp(0, 1)
    return float((columns * x * (share * (1 - share) + share.square() * gain)).sum())


def _concentrated(total: float, most: Tensor) -> Tensor:
    """Let the largest take as much as they can, until nothing is left.

    >>> _concentrated(5.0, torch.tensor([1.0, 4.0, 2.0])).tolist()
    [0.0, 4.0, 1.0]
    """
    ordered, order = most.sort(descending=True)
    left = total - (ordered.cumsum(0) - ordered)
    return torch.empty_like(most).scatter_(0, order, left.clamp(min=0).minimum(ordered))


def _spread(total: float, most: Tensor) -> Tensor:
    """Spread a sum evenly; nobody takes more than its most.

    >>> _spread(5.0, torch.tensor([1.0, 10.0, 10.0])).tolist()
    [1.0, 2.0, 2.0]
    """
    ordered = most.sort().values
    taken = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)[:-1]])
    levels = (total - taken) / torch.arange(len(ordered), 0, -1, device=most.device)
    enough = levels <= ordered
    return most.clamp(max=float(levels[enough][0])) if bool(enough.any()) else most
