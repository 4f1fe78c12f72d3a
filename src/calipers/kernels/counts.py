"""How often each of the 65,536 values of a 16-bit float occurs."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from calipers.kernels.dispatch import as_grid, native_for

BINS = 1 << 16
NAN_BIN = 0x7FC0


def count_values(pieces: Tensor) -> Tensor:
    """Count the values of each piece, (observations, *qparam_shape, rows, columns), by their bits.

    The result is int64 of shape (*qparam_shape, 65536). float16 and bfloat16 are counted as they
    are; other dtypes are rounded to bfloat16, and every NaN among them is counted as 0x7FC0.

    >>> counts = count_values(torch.tensor([[[[1.0, 1.0, -2.0]]]]))
    >>> counts[0, 0x3F80].item(), counts[0, 0xC000].item(), counts.sum().item()
    (2, 1, 3)
    """
    kernels = native_for(pieces)
    return _natively(kernels, pieces) if kernels else _in_torch(pieces)


def _natively(kernels: ModuleType, pieces: Tensor) -> Tensor:
    shape = pieces.shape[1:-2]
    counts = torch.zeros(shape.numel(), BINS, dtype=torch.int64)
    kernels.count_values(as_grid(pieces), counts, torch.get_num_threads())
    return counts.reshape(*shape, BINS)


def _in_torch(pieces: Tensor) -> Tensor:
    shape = pieces.shape[1:-2]
    by_piece = pieces.movedim(0, -3).reshape(shape.numel(), -1)
    counts = [torch.bincount(_codes(values), minlength=BINS) for values in by_piece]
    return torch.stack(counts).reshape(*shape, BINS)


def _codes(values: Tensor) -> Tensor:
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.view(torch.int16).long() & 0xFFFF
    codes = values.to(torch.bfloat16).view(torch.int16).long() & 0xFFFF
    return codes.masked_fill_(values.isnan(), NAN_BIN)
