"""The search that all MSE-like observers share: scale each range, keep what errs least."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.operations import Workload, operation
from calipers.kernels.resources import runs, tile_for
from calipers.numerics.formats import Format, ScaleKind
from calipers.numerics.qparams import quantize_dequantize, safe_qparams


class RangeSearch(NamedTuple):
    """What is searched: factors of the range of each piece, and how their errors count.

    :param pieces: (observations, *qparam_shape, rows, columns)
    :param low: the lower end of what the factors multiply, in the qparam shape; with ``high``, a
        range between whose ends all values of the piece lie
    :param expand: what that range is multiplied by before
    :param patience: how many factors in a row that improve no piece end the search; None: none do
    :param weights: (n, values of a piece); row ``p % n`` belongs to piece ``p``
    """

    pieces: Tensor
    low: Tensor
    high: Tensor
    args: QuantizationArgs
    factors: Sequence[float]
    norm: float
    expand: float = 1.0
    patience: int | None = None
    weights: Tensor | None = None

    def range_of(self, factor: Tensor | float, these: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return the ranges as they would be stored."""
        dtype = self.pieces.dtype
        return self.low[these].mul(factor).to(dtype), self.high[these].mul(factor).to(dtype)


def search_range(search: RangeSearch) -> tuple[Tensor, Tensor]:
    """Find for each piece the range with the least Σ w·|q−x|^norm; a later one must be better.

    A candidate is judged as it would be stored: its range in the dtype of ``pieces``, its scale as
    compressed-tensors makes it from that. The rest is float32, or float64 for float64 pieces.
    Under a global scale (NVFP4) the stored scale depends on tensors not seen here, so there the
    scale is not rounded. NaN and Inf count as zero, which quantizes without error.
    Memory: a few numbers per piece, and a few tiles.
    """
    dtype, shape, args = search.pieces.dtype, search.low.shape, search.args
    if Format.of(args).scale is ScaleKind.E4M3_GLOBAL:
        args = args.model_copy(update={"scale_dtype": None})
    working = torch.float64 if dtype == torch.float64 else torch.float32
    ends = [end.reshape(-1).to(working).contiguous() for end in (search.low, search.high)]
    if search.expand != 1:
        most = torch.finfo(dtype).max
        ends = [end.mul(search.expand).clamp_(-most, most) for end in ends]
    weights = None if search.weights is None else proportions(search.weights)
    search = search._replace(low=ends[0], high=ends[1], args=args, weights=weights)
    low, high = best_range(search) if search.factors else search.range_of(1.0)
    return low.reshape(shape), high.reshape(shape)


def proportions(weights: Tensor) -> Tensor:
    """Divide weights by the largest: only their proportions matter, and sums stay in float32."""
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise ValueError("Weights must be finite and not negative.")
    return weights / weights.max().clamp(min=torch.finfo(weights.dtype).tiny)


@operation(lambda search: Workload((search.pieces,), Format.of(search.args), search.norm))
def best_range(search: RangeSearch) -> tuple[Tensor, Tensor]:
    """Return both ends of the best range of each piece, as they would be stored.

    The ranges are flat here, one number per piece in the working precision, and expanded already.
    """
    low, device, patience = search.low, search.low.device, search.patience
    view = search.pieces.flatten(-2)
    view = view.reshape(view.shape[0], -1, view.shape[-1])
    unit = _unit(low, search.high, search.norm)
    best_error = torch.full(low.shape, torch.inf, dtype=torch.float64, device=device)
    best = torch.zeros(low.shape, dtype=torch.int32, device=device)
    stalled = torch.zeros((), dtype=torch.int64, device=device)
    for index, factor in enumerate(search.factors):
        improved = torch.zeros((), dtype=torch.bool, device=device)
        for these in runs(view.shape[1], view[:, :1].numel(), tile_for(device)):
            error = _error(view[:, these], search, factor, these, unit)
            better = error < best_error[these]
            if patience is not None:
                better &= stalled < max(patience, 1)
            best_error[these] = torch.where(better, error, best_error[these])
            best[these].masked_fill_(better, index)
            improved |= better.any()
        stalled = torch.where(improved, 0, stalled + 1)
        if patience is not None and _asks_freely(device) and stalled >= max(patience, 1):
            break
    return search.range_of(torch.tensor(search.factors, dtype=low.dtype, device=device)[best])


def _asks_freely(device: torch.device) -> bool:
    """Whether a value can be looked at without stopping the device.

    Where it cannot, the search runs on; candidates after the end of patience have no effect.
    """
    return device.type == "cpu"


def _error(
    view: Tensor, search: RangeSearch, factor: float, these: slice, unit: Tensor | None
) -> Tensor:
    """Sum the error of a few pieces, tile by tile."""
    args, working = search.args, search.low.dtype
    fmt = Format.of(args)
    scale, zero_point = (
        v.to(working).unsqueeze(-1) for v in safe_qparams(*search.range_of(factor, these), args)
    )
    if unit is not None:
        scale = scale / unit[these].unsqueeze(-1)
    weights = search.weights
    if weights is not None:
        index = torch.arange(these.start, these.stop, device=weights.device)
        weights = weights[index % weights.shape[0]].to(working)
    # Tiles lie along the observations and, if need be, the values of a piece.
    observations, count, group = view.shape
    tile = tile_for(view.device)
    width = min(group, max(1, tile // count))
    tiles = product(runs(observations, count * width, tile), list(runs(group, count, tile)))
    total = torch.zeros(count, dtype=torch.float64, device=view.device)
    for rows, columns in tiles:
        x = view[rows, :, columns].to(working).nan_to_num(0.0, 0.0, 0.0)
        if unit is not None:
            x.div_(unit[these].unsqueeze(-1))
        error = quantize_dequantize(x, scale, None if args.symmetric else zero_point, fmt).sub_(x)
        error = error.square_() if search.norm == 2 else error.abs_().pow_(search.norm)
        if weights is not None:
            error.mul_(weights[:, columns])
        total += error.sum((0, -1))
    return total


def _unit(low: Tensor, high: Tensor, norm: float) -> Tensor | None:
    """Return a power of two near each absmax, if errors measured in 1 would leave float32.

    Dividing values and scales by it is exact, and changes no comparison between factors.
    """
    mantissa, exponent = torch.frexp(torch.maximum(high, -low))
    exponent.masked_fill_(mantissa == 0, 0)
    if bool((exponent.abs() * norm <= 100 - 10 * norm).all()):
        return None
    return torch.ldexp(torch.ones_like(low), exponent - 1)
