"""The search among factors of ranges, natively."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.native import BACKEND, library, numbers_of
from calipers.kernels.reductions import are_worth_counting, distinct_values
from calipers.kernels.resources import num_threads, runs
from calipers.kernels.search import RangeSearch, best_range, proportions
from calipers.numerics.formats import Format, ScaleKind
from calipers.numerics.layout import as_grid
from calipers.numerics.qparams import safe_qparams

_TABLE = 1 << 22  # scales handed to the kernel at once


@best_range.register(BACKEND)
def _best_range(search: RangeSearch) -> tuple[Tensor, Tensor]:
    factors, patience = search.factors, search.patience
    candidates = torch.tensor(factors, dtype=search.low.dtype, device="cpu")
    if search.weights is None and len(factors) >= 4 and are_worth_counting(search.pieces):
        # Only the values that occur are tried, weighted by how often they do.
        occurring, counts = distinct_values(search.pieces)
        pieces = occurring.expand(1, *search.pieces.shape[1:-2], 1, -1)
        search = search._replace(pieces=pieces, weights=proportions(counts.flatten(0, -2).double()))
    values = as_grid(search.pieces, ordered=search.weights is not None)
    weights = None if search.weights is None else _like(values, search.weights)
    fmt, source, per_row = Format.of(search.args), _scale_source(search), values.shape[2]
    parts = [slice(0, values.shape[1])]
    if source == "given":  # tables of scales are made part by part
        parts = list(runs(values.shape[1], per_row * len(factors), _TABLE))
    stop_after = 0 if patience is None or patience >= len(factors) else max(patience, 1)
    best = torch.zeros(search.low.numel(), dtype=torch.int32)
    # Only if patience can end: how many candidates of a piece are done, and its error so far.
    done = torch.zeros_like(best) if stop_after else None
    least = torch.empty_like(best, dtype=torch.float64) if stop_after else None
    improved = torch.zeros(len(factors), dtype=torch.uint8)  # candidates, the best of any piece
    while True:
        for rows in parts:
            these = slice(rows.start * per_row, rows.stop * per_row)
            tables = {}
            if source == "given":  # scales and zero points, one row per candidate
                qparams = safe_qparams(*search.range_of(candidates[:, None], these), search.args)
                scales, zero_points = (value.float().contiguous() for value in qparams)
                tables = {"scales": scales, "zero_points": zero_points}
            library().search(
                values=values[:, rows],
                weights=None if weights is None else weights[:, rows],
                ranges=library().RangeFactors(
                    low=search.low[these], high=search.high[these], factors=candidates
                ),
                numbers=numbers_of(fmt.grid),
                norm=search.norm,
                scales=library().ScaleChoice(source=source, shifted=not fmt.symmetric, **tables),
                progress=library().Progress(
                    patience=stop_after,
                    best=best[these],
                    done=None if done is None else done[these],
                    least=None if least is None else least[these],
                    improved=improved,
                ),
                threads=num_threads(),
            )
        # A later part may have shown that patience lasts longer than an earlier one knew.
        if len(parts) == 1 or done is None or int(done.min()) == int(done.max()):
            break
    low, high = search.pieces.new_empty(2, best.numel())
    ranges = library().RangeFactors(low=search.low, high=search.high, factors=candidates)
    library().scale_ranges(ranges=ranges, best=best, start=low, end=high, threads=num_threads())
    return low, high


def _scale_source(search: RangeSearch) -> str:
    """Say whether the native kernel can work out the scales itself, and how."""
    fmt = Format.of(search.args)
    if fmt.scale is ScaleKind.POWER_OF_TWO:
        return "power_of_two"
    # Ranges wider than the dtype are for compressed-tensors' repaired arithmetic.
    most = torch.finfo(search.pieces.dtype).max
    if not fmt.symmetric and bool((search.high.double() - search.low > most).any()):
        return "given"
    return "plain" if search.args.scale_dtype is None else "given"


def _like(values: Tensor, weights: Tensor) -> Tensor:
    """Lay weights over a grid of pieces, without a copy of them."""
    grid_rows, grid_columns, rows, columns = values.shape[1:]
    weights = weights.float()
    if grid_columns % weights.shape[0]:
        index = torch.arange(grid_rows * grid_columns) % weights.shape[0]
        return weights[index].reshape(1, *values.shape[1:]).expand(values.shape)
    weights = weights.reshape(1, 1, -1, rows, columns)
    return weights.repeat(1, 1, grid_columns // weights.shape[2], 1, 1).expand(values.shape)
