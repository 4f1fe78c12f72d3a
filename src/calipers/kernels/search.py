"""The search that all MSE-like observers share: scale each range, keep what errs least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.numerics.formats import Format, ScaleKind
from calipers.numerics.qparams import quantize_dequantize, safe_qparams

_TILE = {"cpu": 1 << 20}
_DEFAULT_TILE = 1 << 24  # values worked on at once: the caches of a CPU, the cores of the others


def search_range(
    view: Tensor,
    min_vals: Tensor,
    max_vals: Tensor,
    args: QuantizationArgs,
    *,
    factors: Sequence[float],
    norm: float,
    expand: float = 1.0,
    patience: int | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Find for each piece of ``view`` the factor of its range with the least Σ w·|q−x|^norm.

    ``view`` is canonical; ``min_vals`` and ``max_vals`` have its qparam shape; what the factors
    multiply is ``expand`` times that range. ``weights`` has shape (n, group): row ``p % n`` belongs
    to piece ``p``. A later factor must be strictly better.
    The search ends after ``patience`` factors in a row that improve no piece (``None``: never).

    A candidate is judged as it would be stored: its range in the dtype of ``view``, its scale as
    compressed-tensors makes it from that. The rest is float32, or float64 for a float64 view.
    Under a global scale (NVFP4) the stored scale depends on tensors not seen here, so there the
    scale is not rounded. Memory: a few numbers per piece, and a few tiles.
    """
    if Format.of(args).scale is ScaleKind.E4M3_GLOBAL:
        args = args.model_copy(update={"scale_dtype": None})
    shape, dtype, device = min_vals.shape, view.dtype, view.device
    view = view.reshape(view.shape[0], -1, view.shape[-1])
    working = torch.float64 if dtype == torch.float64 else torch.float32
    most = torch.finfo(dtype).max
    low, high = (
        bound.reshape(-1).to(working).mul(expand).clamp_(-most, most)
        for bound in (min_vals, max_vals)
    )
    if not factors:
        return low.to(dtype).reshape(shape), high.to(dtype).reshape(shape)

    unit = _unit(low, high, norm)
    best_error = torch.full(low.shape, torch.inf, dtype=torch.float64, device=device)
    best = torch.zeros(low.shape, dtype=torch.int32, device=device)
    stalled = torch.zeros((), dtype=torch.int64, device=device)
    for index, factor in enumerate(factors):
        improved = torch.zeros((), dtype=torch.bool, device=device)
        for pieces in _pieces(view):
            start, end = (bound[pieces].mul(factor).to(dtype) for bound in (low, high))
            qparams = safe_qparams(start, end, args)
            weight = None if weights is None else _rows(weights, pieces).to(working)
            scaling = None if unit is None else unit[pieces]
            error = _error(view[:, pieces], qparams, args, norm, weight, scaling, working)
            better = error < best_error[pieces]
            if patience is not None:
                better &= stalled < max(patience, 1)
            best_error[pieces] = torch.where(better, error, best_error[pieces])
            best[pieces].masked_fill_(better, index)
            improved |= better.any()
        stalled = torch.where(improved, 0, stalled + 1)
        if patience is not None and _asks_freely(device) and stalled >= max(patience, 1):
            break
    chosen = torch.tensor(factors, dtype=working, device=device)[best]
    return low.mul_(chosen).to(dtype).reshape(shape), high.mul_(chosen).to(dtype).reshape(shape)


def _error(
    view: Tensor,
    qparams: tuple[Tensor, Tensor],
    args: QuantizationArgs,
    norm: float,
    weights: Tensor | None,
    unit: Tensor | None,
    working: torch.dtype,
) -> Tensor:
    """Sum the error of a few pieces, tile by tile."""
    fmt = Format.of(args)
    scale = qparams[0].to(working).unsqueeze(-1)
    zero_point = None if args.symmetric else qparams[1].to(working).unsqueeze(-1)
    total = torch.zeros(view.shape[1], dtype=torch.float64, device=view.device)
    for rows, columns in _tiles(view):
        x = view[rows, :, columns].to(working)
        error = quantize_dequantize(x, scale, zero_point, fmt).sub_(x)
        if unit is not None:
            error.div_(unit.unsqueeze(-1))
        error = error.square_() if norm == 2 else error.abs_().pow_(norm)
        if weights is not None:
            error.mul_(weights[:, columns])
        total += error.sum((0, -1))
    return total


def _pieces(view: Tensor) -> Iterator[slice]:
    """Cut the pieces into runs of about one tile; a piece larger than that stands alone."""
    observations, count, group = view.shape
    step = max(1, _tile_size(view) // (observations * group))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _tiles(view: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cut a run of pieces into tiles along its observations and, if need be, its groups."""
    observations, count, group = view.shape
    columns = min(group, max(1, _tile_size(view) // count))
    rows = max(1, _tile_size(view) // (count * columns))
    for row in range(0, observations, rows):
        for column in range(0, group, columns):
            yield slice(row, row + rows), slice(column, column + columns)


def _asks_freely(device: torch.device) -> bool:
    """Whether a value can be looked at without stopping the device.

    Where it cannot, the search runs on; candidates after the end of patience have no effect.
    """
    return device.type == "cpu"


def _tile_size(view: Tensor) -> int:
    return _TILE.get(view.device.type, _DEFAULT_TILE)


def _rows(weights: Tensor, pieces: slice) -> Tensor:
    index = torch.arange(pieces.start, pieces.stop, device=weights.device)
    return weights[index % weights.shape[0]]


def _unit(low: Tensor, high: Tensor, norm: float) -> Tensor | None:
    """Return a power of two near each absmax, if errors measured in 1 would leave float32.

    Dividing by it is exact, and changes no comparison between factors.
    """
    mantissa, exponent = torch.frexp(torch.maximum(high, -low))
    exponent.masked_fill_(mantissa == 0, 0)
    if bool((exponent.abs() * norm <= 100 - 10 * norm).all()):
        return None
    return torch.ldexp(torch.ones_like(low), exponent)
