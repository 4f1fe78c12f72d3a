"""Counts of values, natively."""

from __future__ import annotations

from torch import Tensor

from calipers.kernels.counts import add_counts
from calipers.kernels.native import BACKEND, library
from calipers.kernels.pieces import as_grid
from calipers.kernels.threads import num_threads


@add_counts.register(BACKEND)
def _natively(pieces: Tensor, table: Tensor) -> None:
    library().count_values(values=as_grid(pieces), counts=table, threads=num_threads())
