"""The search among factors of ranges, natively."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.native import BACKEND, library, numbers_of
from calipers.kernels.reductions import are_worth_counting, distinct_values
from calipers.kernels.resources import num_threads, runs
from calipers.kernels.search import Search, best_range, proportions
from calipers.numerics.formats import Format, ScaleKind
from calipers.numerics.layout import as_grid
from calipers.numerics.qparams import safe_qparams

_TABLE = 1 << 22  # scales handed to the kernel at once


@best_range.register(BACKEND)
def _natively(
    search: Search, factors: Sequence[float], patience: int | None
) -> tuple[Tensor, Tensor]:
    candidates = torch.tensor(factors, dtype=search.low.dtype, device="cpu")
    best = _best(search, candidates, patience)
    low, high = search.pieces.new_empty(2, best.numel())
    ranges = library().RangeFactors(low=search.low, high=search.high, factors=candidates)
    library().scale_ranges(ranges=ranges, best=best, start=low, end=high, threads=num_threads())
    return low, high


def _best(search: Search, factors: Tensor, patience: int | None) -> Tensor:
    if search.weights is None and len(factors) >= 4 and are_worth_counting(search.pieces):
        search = _counted(search)
    values = as_grid(search.pieces, ordered=search.weights is not None)
    weights = None if search.weights is None else _like(values, search.weights)
    stop_after = 0 if patience is None or patience >= len(factors) else max(patience, 1)
    known = _Known.nothing(search.low.numel(), len(factors), stop_after)
    source = _scale_source(search)
    work = _NativeSearch(search, values, weights, factors, source, known)
    parts = [slice(0, values.shape[1])]
    if source == "given":  # tables of scales are made part by part
        parts = list(runs(values.shape[1], values.shape[2] * len(factors), _TABLE))
    work.run(parts)
    # A later part may have shown that patience lasts longer than an earlier one knew.
    while len(parts) > 1 and known.is_uneven():
        work.run(parts)
    return known.best


class _Known(NamedTuple):
    """What is known of each piece: the best of the candidates that are done, and its error.

    The latter two are there only if patience can end; ``improved`` says which candidates were the
    best so far of any piece.
    """

    patience: int
    best: Tensor
    done: Tensor | None
    least: Tensor | None
    improved: Tensor

    @classmethod
    def nothing(cls, pieces: int, candidates: int, patience: int) -> _Known:
        """Begin."""
        return cls(
            patience,
            torch.zeros(pieces, dtype=torch.int32),
            torch.zeros(pieces, dtype=torch.int32) if patience else None,
            torch.empty(pieces, dtype=torch.float64) if patience else None,
            torch.zeros(candidates, dtype=torch.uint8),
        )

    def of(self, these: slice) -> _Known:
        """Return what is known of some pieces; what is learnt of them is learnt here."""
        done, least = (None if part is None else part[these] for part in (self.done, self.least))
        return self._replace(best=self.best[these], done=done, least=least)

    def is_uneven(self) -> bool:
        """Whether some pieces have been through more candidates than others."""
        return self.done is not None and int(self.done.min()) < int(self.done.max())


class _NativeSearch(NamedTuple):
    """A search, with its pieces and weights as the native kernel takes them."""

    search: Search
    values: Tensor
    weights: Tensor | None
    factors: Tensor
    source: str
    known: _Known

    def run(self, parts: Sequence[slice]) -> None:
        """Search rows of the grid of pieces, part by part."""
        search, fmt = self.search, Format.of(self.search.args)
        for rows in parts:
            these = slice(rows.start * self.values.shape[2], rows.stop * self.values.shape[2])
            tables = _tables(search, self.factors, these) if self.source == "given" else {}
            library().search(
                values=self.values[:, rows],
                weights=None if self.weights is None else self.weights[:, rows],
                ranges=library().RangeFactors(
                    low=search.low[these], high=search.high[these], factors=self.factors
                ),
                numbers=numbers_of(fmt.grid),
                norm=search.norm,
                scales=library().ScaleChoice(
                    source=self.source, shifted=not fmt.symmetric, **tables
                ),
                progress=library().Progress(**self.known.of(these)._asdict()),
                threads=num_threads(),
            )


def _counted(search: Search) -> Search:
    """Turn a search over values into one over those that occur, weighted by how often they do."""
    values, counts = distinct_values(search.pieces)
    pieces = values.expand(1, *search.pieces.shape[1:-2], 1, -1)
    return search._replace(pieces=pieces, weights=proportions(counts.flatten(0, -2).double()))


def _scale_source(search: Search) -> str:
    """Say whether the native kernel can work out the scales itself, and how."""
    fmt = Format.of(search.args)
    if fmt.scale is ScaleKind.POWER_OF_TWO:
        return "power_of_two"
    # Ranges wider than the dtype are for compressed-tensors' repaired arithmetic.
    most = torch.finfo(search.pieces.dtype).max
    if not fmt.symmetric and bool((search.high.double() - search.low > most).any()):
        return "given"
    return "plain" if search.args.scale_dtype is None else "given"


def _tables(search: Search, factors: Tensor, these: slice) -> dict[str, Tensor]:
    """Return scales and zero points, one row per candidate."""
    qparams = safe_qparams(*search.range_of(factors[:, None], these), search.args)
    scales, zero_points = (value.float().contiguous() for value in qparams)
    return {"scales": scales, "zero_points": zero_points}


def _like(values: Tensor, weights: Tensor) -> Tensor:
    """Lay weights over a grid of pieces, without a copy of them."""
    grid_rows, grid_columns, rows, columns = values.shape[1:]
    weights = weights.float()
    if grid_columns % weights.shape[0]:
        index = torch.arange(grid_rows * grid_columns) % weights.shape[0]
        return weights[index].reshape(1, *values.shape[1:]).expand(values.shape)
    weights = weights.reshape(1, 1, -1, rows, columns)
    return weights.repeat(1, 1, grid_columns // weights.shape[2], 1, 1).expand(values.shape)
