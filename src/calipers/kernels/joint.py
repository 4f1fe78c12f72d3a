"""Choosing among candidates by Δᵀ H Δ: the error of a layer's output, not of its weight.

Under a Hessian the errors of neighbours can make up for each other, so that the scales of all
pieces in one block are chosen together: piece after piece takes its best candidate given the
others, until nothing changes. Each choice lowers the error, so that this ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.extrema import extrema
from calipers.kernels.operations import Workload, operation
from calipers.kernels.pieces import as_grid
from calipers.kernels.tiles import TILE
from calipers.numerics.formats import Format
from calipers.numerics.qparams import quantize_dequantize

ROUNDS = 4
"""Turns of every piece; hardly anything changes after the second."""
_SAFE_EXPONENT = 32  # of values: float32 holds the squares of errors, times a Hessian near one


def choose_together(
    pieces: Tensor, scales: Tensor, zeros: Tensor, hessian: Tensor, args: QuantizationArgs
) -> Tensor:
    """Return which candidate each piece takes.

    ``scales`` and ``zeros`` have shape (*qparam_shape, candidates), ``hessian`` (blocks, width,
    width) along the columns of a row of pieces. The search begins with the first candidate of all
    pieces of a row and a block, or with the last one of all, whichever is better.
    """
    grid = as_grid(pieces, ordered=True)[0]
    hessian = hessian.to(grid.device, torch.float32)
    scales, zeros = (part.reshape(*grid.shape[:2], -1) for part in (scales, zeros))
    grid, scales, _ = in_units(grid, scales)
    chosen = choose_in_blocks(grid, scales, zeros.float(), hessian, args)
    return chosen.reshape(pieces.shape[1:-2])


@operation(lambda grid, *others: Workload((grid,), Format.of(others[-1])))
def choose_in_blocks(
    grid: Tensor, scales: Tensor, zeros: Tensor, hessian: Tensor, args: QuantizationArgs
) -> Tensor:
    """Return which candidate each piece of a grid takes, (grid rows, grid columns).

    :param grid: (grid rows, grid columns, rows, columns)
    :param scales: (grid rows, grid columns, candidates), and zeros alike
    """
    chosen = torch.empty(grid.shape[:2], dtype=torch.int64, device=grid.device)
    count = scales.shape[-1]
    step = max(1, TILE // (grid[0].numel() * count))
    for start in range(0, len(grid), step):
        these = slice(start, start + step)
        whole = grid[these].unsqueeze(2).expand(-1, -1, count, -1, -1)
        if hessian.shape[-1] > grid.shape[-1]:
            candidates = differences(whole.float(), scales[these], zeros[these], args)
            chosen[these] = _descend(candidates, hessian)
            continue
        errors = torch.zeros(scales[these].shape, dtype=torch.float64, device=grid.device)
        for x in by_rows(whole):
            errors += _forms(differences(x.float(), scales[these], zeros[these], args), hessian)
        chosen[these] = errors.argmin(-1)
    return chosen


def in_units(grid: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Divide rows of pieces and their scales, returned in float32, by a power of two for each row.

    It is near the largest value, so that squares of errors stay within float32. Dividing by it is
    exact; where no row needs it, the last result is None.

    :param grid: (grid rows, grid columns, rows, columns)
    :param scales: (grid rows, grid columns, candidates)
    """
    found = extrema(grid[None])
    _, exponents = torch.frexp(torch.maximum(-found.min_vals, found.max_vals).amax(1).double())
    if bool((exponents.abs() <= _SAFE_EXPONENT).all()):
        return grid, scales.float(), None
    units = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents - 1)
    working = torch.promote_types(grid.dtype, torch.float32)
    grid = grid / units.to(working)[:, None, None, None]
    return grid, (scales / units[:, None, None]).float(), units


def by_rows(x: Tensor) -> Iterator[Tensor]:
    """Cut the rows of pieces, the dimension before the last, into tiles."""
    step = max(1, TILE // max(1, x[..., :1, :].numel()))
    return iter(torch.split(x, step, dim=-2))


def differences(x: Tensor, scales: Tensor, zeros: Tensor, args: QuantizationArgs) -> Tensor:
    """Return q−x of values whose last two dimensions are the rows and columns of a piece.

    NaN and Inf count as zero, which quantizes without error.
    """
    x = x.nan_to_num(0.0, 0.0, 0.0)
    scales, zeros = (part.to(x)[..., None, None] for part in (scales, zeros))
    q = quantize_dequantize(x, scales, None if args.symmetric else zeros, Format.of(args))
    return q.sub_(x)


def _forms(candidates: Tensor, hessian: Tensor) -> Tensor:
    """Return Δᵀ H Δ of candidates, (grid rows, grid columns, candidates, rows, columns)."""
    grid_rows, grid_columns, count, rows, _ = candidates.shape
    width = hessian.shape[-1]
    blocks = candidates.reshape(grid_rows, grid_columns, count, rows, -1, width)
    blocks = blocks.permute(1, 4, 0, 2, 3, 5).reshape(len(hessian), -1, width)
    forms = (torch.bmm(blocks, hessian) * blocks).sum(-1, dtype=torch.float64)
    return forms.reshape(grid_columns, -1, grid_rows, count, rows).sum((1, 4)).transpose(0, 1)


def _descend(candidates: Tensor, hessian: Tensor) -> Tensor:
    """Let the pieces of each block take turns."""
    grid_rows, _, count, rows, columns = candidates.shape
    blocks = len(hessian)
    # From here on (blocks, pieces of a block, grid rows, candidates, rows, columns).
    candidates = candidates.reshape(grid_rows, blocks, -1, count, rows, columns)
    candidates = candidates.permute(1, 2, 0, 3, 4, 5)
    starts = candidates[:, :, :, 0], candidates[:, :, :, -1]
    # H Δ of every row: what a change of one piece meets.
    pulls = [_times(_side_by_side(start), hessian) for start in starts]
    forms = [
        (pull * _side_by_side(start)).sum((-1, -2))
        for pull, start in zip(pulls, starts, strict=True)
    ]
    last = forms[1] < forms[0]
    chosen = torch.where(last, count - 1, 0)[:, None].repeat(1, candidates.shape[1], 1)
    current = torch.where(last[:, None, :, None, None], starts[1], starts[0])
    pull = torch.where(last[:, :, None, None], pulls[1], pulls[0])
    for _ in range(ROUNDS):
        before = chosen.clone()
        for place in range(candidates.shape[1]):
            own = slice(place * columns, (place + 1) * columns)
            steps = candidates[:, place] - current[:, place, :, None]
            across = _times(steps, hessian[:, own, own])
            gains = ((across + 2 * pull[:, :, None, :, own]) * steps).sum((-1, -2))
            best = gains.argmin(-1)
            at = best[..., None, None, None].expand(-1, -1, 1, rows, columns)
            taken = steps.gather(2, at).squeeze(2)
            chosen[:, place] = best
            current[:, place] += taken
            pull += _times(taken, hessian[:, own])
        if torch.equal(chosen, before):
            break
    return chosen.permute(2, 0, 1).flatten(1)


def _side_by_side(pieces: Tensor) -> Tensor:
    """Join (blocks, pieces, grid rows, rows, columns) to rows of whole blocks."""
    return pieces.permute(0, 2, 3, 1, 4).flatten(-2)


def _times(vectors: Tensor, matrices: Tensor) -> Tensor:
    """Multiply many vectors, in the last dimension, by the matrix of their block, in the first."""
    products = torch.bmm(vectors.flatten(1, -2), matrices)
    return products.reshape(*vectors.shape[:-1], matrices.shape[-1])
