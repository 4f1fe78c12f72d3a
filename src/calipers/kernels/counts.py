"""How often each of the 65,536 values of a 16-bit float occurs."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.kernels.operations import Workload, operation

BINS = 1 << 16
NAN_BIN = 0x7FC0
_MOST_COUNTED = 64  # pieces; the counts of one take half a megabyte


def count_values(pieces: Tensor, into: Tensor | None = None) -> Tensor:
    """Count the values of each piece, (observations, *qparam_shape, rows, columns), by their bits.

    The result is int64 of shape (*qparam_shape, 65536). float16 and bfloat16 are counted as they
    are; other dtypes are rounded to bfloat16, and every NaN among them is counted as 0x7FC0.
    Such a result can be given as ``into``: it is added to, and returned.

    >>> counts = count_values(torch.tensor([[[[1.0, 1.0, -2.0]]]]))
    >>> counts[0, 0x3F80].item(), counts[0, 0xC000].item(), counts.sum().item()
    (2, 1, 3)
    >>> count_values(torch.tensor([[[[1.0, 5.0]]]]), into=counts)[0, 0x3F80].item()
    3
    """
    shape = (*pieces.shape[1:-2], BINS)
    if into is None:
        into = torch.zeros(shape, dtype=torch.int64, device=pieces.device)
    if into.shape != shape or into.dtype != torch.int64 or not into.is_contiguous():
        raise ValueError(f"Counts are added into contiguous int64 of shape {shape}.")
    add_counts(pieces, into.view(-1, BINS))
    return into


def are_worth_counting(pieces: Tensor) -> bool:
    """Whether pieces are so long that most values of their 16-bit dtype occur many times."""
    count = pieces.shape[1:-2].numel()
    long_enough = pieces.numel() >= 4 * BINS * count and count <= _MOST_COUNTED
    return pieces.dtype.itemsize == 2 and long_enough


def distinct_values(pieces: Tensor) -> tuple[Tensor, Tensor]:
    """Return the finite values that occur in any piece, and how often: (*qparam_shape, values).

    >>> distinct_values(torch.tensor([[[[1.0, 3.0, 1.0]]]], dtype=torch.bfloat16))
    (tensor([0., 1., 3.], dtype=torch.bfloat16), tensor([[0, 2, 1]]))
    """
    counts = count_values(pieces)
    values = torch.arange(BINS, dtype=torch.int32).to(torch.int16).view(pieces.dtype)
    occurring = counts.flatten(0, -2).any(0).cpu() & torch.isfinite(values)
    occurring[0] = True  # the zero, for pieces without any finite value
    return values[occurring].to(pieces.device), counts[..., occurring.to(counts.device)]


@operation(lambda pieces, *_: Workload((pieces,)))
def add_counts(pieces: Tensor, table: Tensor) -> None:
    """Add the counts of each piece to its row of a table, (pieces, 65536)."""
    by_piece = pieces.movedim(0, -3).reshape(len(table), -1)
    for row, values in zip(table, by_piece, strict=True):
        row += torch.bincount(_codes(values), minlength=BINS)


def _codes(values: Tensor) -> Tensor:
    if values.dtype in (torch.float16, torch.bfloat16):
        return values.resolve_neg().view(torch.int16).long() & 0xFFFF
    codes = values.to(torch.bfloat16).view(torch.int16).long() & 0xFFFF
    return codes.masked_fill_(values.isnan(), NAN_BIN)
