"""Reductions: extrema, sums of squares and products, and counts of values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from calipers.kernels.operations import Workload, operation
from calipers.kernels.resources import runs

BINS = 1 << 16  # codes of 16 bits
NAN_BIN = 0x7FC0
_MOST_COUNTED = 64  # pieces; the counts of one take half a megabyte
_TOKENS = 256  # added up in float32, as the native kernel does; more in wide products
_STRIP = 192  # rows of a symmetric product that are computed together, up to the diagonal


class Extrema(NamedTuple):
    """The range of the finite values of each piece, and how many values were not finite.

    A piece without any finite value has the range (0, 0), and is marked in ``missing``.
    """

    min_vals: Tensor
    max_vals: Tensor
    nonfinite: int = 0
    missing: Tensor | None = None


@operation(lambda pieces: Workload((pieces,)))
def extrema(pieces: Tensor) -> Extrema:
    """Reduce pieces, (observations, *qparam_shape, rows, columns), to their extrema.

    >>> extrema(torch.tensor([[[[1.0, -2.0, float("nan")]]]]))[:3]
    (tensor([-2.]), tensor([1.]), 1)
    """
    dims = (0, -2, -1)
    low, high = pieces.amin(dims), pieces.amax(dims)
    # NaN spreads and Inf is extreme: finite extrema prove that every value is finite.
    if bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        return Extrema(low, high)
    finite = torch.isfinite(pieces)
    low = pieces.masked_fill(~finite, torch.inf).amin(dims)
    high = pieces.masked_fill(~finite, -torch.inf).amax(dims)
    missing = ~finite.any(-1).any(-1).any(0)
    low, high = low.masked_fill_(missing, 0), high.masked_fill_(missing, 0)
    return Extrema(low, high, finite.numel() - int(finite.sum()), missing)


@operation(lambda tokens, *_, **__: Workload((tokens,)))
def sum_of_squares(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Sum the squares of a (tokens, channels) matrix over the tokens that count, in float64.

    >>> sum_of_squares(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.tensor([True, False]))
    tensor([1., 4.], dtype=torch.float64)
    """
    if mask is not None:
        tokens = tokens[mask.to(tokens.device, torch.bool)]
    total = tokens.new_zeros(tokens.shape[-1], dtype=torch.float64)
    for rows in runs(len(tokens), each=tokens.shape[-1]):
        total += tokens[rows].double().square().sum(0)
    return total


@operation(lambda left, right=None: Workload((left,) if right is None else (left, right)))
@torch.no_grad()
def sum_of_products(left: Tensor, right: Tensor | None = None) -> Tensor:
    """Return leftᵀ right of two matrices (tokens, channels) in float64; of ``left`` alone if one.

    Sums of some hundred tokens are made in float32, and added up in float64. The product of a
    matrix with itself is computed on one side of its diagonal, hence exactly symmetric.

    >>> sum_of_products(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    tensor([[10.,  2.],
            [ 2.,  4.]], dtype=torch.float64)
    """
    other = left if right is None else right
    total = left.new_zeros(left.shape[1], other.shape[1], dtype=torch.float64)
    if not total.numel() or not len(left):
        return total
    working = torch.promote_types(left.dtype, torch.float32)
    step = max(_TOKENS, total.shape[1] // 4)
    for x, y in zip(torch.split(left, step), torch.split(other, step), strict=True):
        x = x.to(working)
        if right is not None:
            total += x.T @ y.to(working)
            continue
        for rows in runs(len(total), tile=_STRIP):
            total[rows, : rows.stop] += x[:, rows].T @ x[:, : rows.stop]
    if right is None:
        for rows in runs(len(total), tile=_STRIP):
            total[: rows.start, rows] = total[rows, : rows.start].T
            total[rows, rows] = total[rows, rows].tril() + total[rows, rows].tril(-1).T
    return total


def count_values(pieces: Tensor, into: Tensor | None = None) -> Tensor:
    """Count the values of each piece, (observations, *qparam_shape, rows, columns), by their bits.

    The result is int64 of shape (*qparam_shape, 65536). float16 and bfloat16 are counted as they
    are; other dtypes are rounded to bfloat16, and every NaN among them is counted as 0x7FC0.
    Such a result can be given as ``into``: it is added to, and returned.

    >>> counts = count_values(torch.tensor([[[[1.0, 1.0, -2.0]]]]))
    >>> counts[0, 0x3F80].item(), counts[0, 0xC000].item(), counts.sum().item()
    (2, 1, 3)
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
    has_own_codes = pieces.dtype in (torch.float16, torch.bfloat16)
    for row, values in zip(table, by_piece, strict=True):
        small = values.resolve_neg() if has_own_codes else values.to(torch.bfloat16)
        codes = small.view(torch.int16).long() & 0xFFFF
        if not has_own_codes:
            codes.masked_fill_(values.isnan(), NAN_BIN)
        row += torch.bincount(codes, minlength=BINS)


class ChannelSummary(NamedTuple):
    """What was found in each channel of a matrix whose values are all finite.

    :param extrema: the smallest value of each channel, and the largest: (2, channels)
    :param square_sums: Σx² of each channel, float64
    """

    extrema: Tensor
    square_sums: Tensor


@operation(lambda tokens, *_, **__: Workload((tokens,)))
def summarize_channels(
    tokens: Tensor, mask: Tensor | None = None, *, counts: Tensor | None = None
) -> ChannelSummary | None:
    """Reduce a (tokens, channels) matrix, of which at least one token counts, in one pass.

    None if a value is not finite. Values are counted in any case.

    :param mask: which tokens count, bool; None for all
    :param counts: what :func:`count_values` returns for the whole matrix; it is added to
    """
    kept = tokens if mask is None else tokens[mask]
    if counts is not None:
        count_values(kept[:, None, None], into=counts)
    ends = extrema(kept[:, :, None, None])
    if ends.nonfinite:
        return None
    ranges = torch.stack([ends.min_vals, ends.max_vals])
    return ChannelSummary(ranges, sum_of_squares(tokens, mask))
