"""Codes and scales whose errors make up for each other under a Hessian: Δ H Δᵀ, Δ = q − w, per row.

**Error feedback and descent.** With H = M D Mᵀ, M unit upper triangular, the error of a row is the
sum of D_j (Δ M)_j², whose j-th term knows the columns up to j only. Error feedback, known as GPTQ,
makes these terms as small as it can, column after column. Descent then goes over the columns again
and gives each the best value that all others leave it.

**Joint choice** among candidates for scales. The scales of all pieces in one block of H are chosen
together: piece after piece takes its best candidate given the others, until nothing changes. Each
choice lowers the error, so that this ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch import Tensor

from calipers.kernels.operations import Workload, operation
from calipers.kernels.reductions import extrema
from calipers.kernels.resources import runs
from calipers.numerics.formats import Format
from calipers.numerics.layout import as_grid
from calipers.numerics.qparams import quantize_dequantize

LEAST_GAIN = 2.0**-14
"""Of what a step costs by itself. A gain that is less can be one of rounding alone."""
ROUNDS = 4
"""Turns of every piece in a joint choice; hardly anything changes after the second."""
_SAFE_EXPONENT = 32  # of values: float32 holds the squares of errors, times a Hessian near one


class Rounding(NamedTuple):
    """What the values of a matrix (rows, columns) are rounded to.

    :param scales: what codes are multiplied by, of either sign, not zero, (rows or 1, groups)
    :param zeros: zero points of the same shape; None, and of no use, for symmetric formats
    :param groups: the group of each column, int64, in any order
    """

    scales: Tensor
    zeros: Tensor | None
    groups: Tensor
    fmt: Format

    def nearest(self, values: Tensor) -> Tensor:
        """Round each value to the nearest."""
        zeros = None if self.zeros is None else self.zeros[:, self.groups]
        return quantize_dequantize(values, self.scales[:, self.groups], zeros, self.fmt)

    def checked(self, target: Tensor) -> Rounding:
        """Return the same in the dtype and on the device of a target; refuse what does not fit."""
        (rows, columns), (scales, zeros, groups, fmt) = target.shape, self
        zeros = None if fmt.symmetric else zeros
        for name, part in (("scales", scales), ("zeros", zeros)):
            if part is not None and (part.shape[:-1] not in ((rows,), (1,)) or part.dim() != 2):
                raise ValueError(f"The {name} have shape {tuple(part.shape)} for {rows} rows.")
        if zeros is not None and zeros.shape != scales.shape:
            raise ValueError("Scales and zeros must have the same shape.")
        if groups.shape != (columns,) or groups.dtype != torch.int64:
            raise ValueError(f"Groups must be int64, one for each of {columns} columns.")
        if columns and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
            raise ValueError(f"Groups must number the {scales.shape[1]} columns of scales.")
        scales = scales.detach().to(target).contiguous()
        zeros = None if zeros is None else zeros.detach().to(target).contiguous()
        return Rounding(scales, zeros, groups.to(target.device).contiguous(), fmt)


class Feedback(NamedTuple):
    """What error feedback is given, and what it has written so far; all of shape (rows, columns).

    :param factor: (columns, columns), see :func:`feed_back`
    :param result: the values after quantization
    :param errors: how far the target is from them
    """

    target: Tensor
    factor: Tensor
    rounding: Rounding
    result: Tensor
    errors: Tensor


class Descent(NamedTuple):
    """What descent changes, ``values`` and ``pulls``, and what it goes by; see :func:`descend`."""

    values: Tensor
    target: Tensor
    hessian: Tensor
    rounding: Rounding
    block: int
    pulls: Tensor | None


@torch.no_grad()
def feed_back(target: Tensor, factor: Tensor, rounding: Rounding, block: int = 128) -> Tensor:
    """Quantize column after column, each with the errors of those before it: q_j = Q(w_j − Σ Δ M).

    Returns the values after quantization, (rows, columns), in the working precision: float64 for a
    float64 target, else float32. All numbers must be finite.

    :param target: what is quantized, (rows, columns)
    :param factor: M of H = M D Mᵀ, (columns, columns); only what is above its diagonal is read
    :param block: columns that are worked on at a time
    """
    target = _working(target)
    rounding = rounding.checked(target)
    factor = _square(factor, target, "factor")
    errors = torch.zeros_like(target)
    feedback = Feedback(target, factor, rounding, torch.empty_like(target), errors)
    for columns in _blocks(target, block):
        adjusted = torch.addmm(
            target[:, columns], errors[:, : columns.start], factor[: columns.start, columns]
        )
        feed_back_block(feedback, adjusted, columns)
    return feedback.result


@torch.no_grad()
def descend(
    values: Tensor,
    target: Tensor,
    hessian: Tensor,
    rounding: Rounding,
    sweeps: int,
    block: int = 128,
    pulls: Tensor | None = None,
) -> tuple[Tensor, int]:
    """Give each value the best that all others leave it, column after column, again and again.

    Returns the values, and how many changes were made; none: they were at the best before. What a
    value becomes lowers Δ H Δᵀ of its row, Δ = values − target, by more than rounding could, or it
    stays. So do columns whose diagonal of H is not positive. Ends after so many ``sweeps``, or
    before, when nothing changes any more. ``hessian`` is symmetric, (columns, columns); all else is
    as for ``feed_back``.

    :param pulls: (values − target) @ hessian where it is known, in the working precision; it is
        changed in place, to what it is for the values that come back
    """
    target = _working(target)
    if values.shape != target.shape:
        raise ValueError(f"Values of shape {tuple(values.shape)} for {tuple(target.shape)}.")
    values = values.detach().to(target).clone(memory_format=torch.contiguous_format)
    hessian, rounding = _square(hessian, target, "hessian"), rounding.checked(target)
    descent = Descent(values, target, hessian, rounding, block, pulls)
    return values, descend_in_place(descent, sweeps)


def _working(target: Tensor) -> Tensor:
    if target.dim() != 2 or not target.is_floating_point():
        raise ValueError("The target must be a matrix of floats.")
    return target.detach().to(torch.promote_types(target.dtype, torch.float32)).contiguous()


def _square(matrix: Tensor, target: Tensor, name: str) -> Tensor:
    columns = target.shape[1]
    if matrix.shape != (columns, columns):
        raise ValueError(f"The {name} has shape {tuple(matrix.shape)} for {columns} columns.")
    return matrix.detach().to(target).contiguous()


def _blocks(target: Tensor, block: int) -> Iterator[slice]:
    if block < 1:
        raise ValueError("A block has at least one column.")
    return runs(target.shape[1], tile=block)


def _rounded(values: Tensor, rounding: Rounding, group: int, rows: Tensor | None = None) -> Tensor:
    """Round one column, of all rows or of some."""
    all_alike = rows is None or len(rounding.scales) == 1
    scale, zero = (
        None if part is None else part[:, group] if all_alike else part[rows, group]
        for part in (rounding.scales, rounding.zeros)
    )
    assert scale is not None
    return quantize_dequantize(values, scale, zero, rounding.fmt)


@operation(lambda feedback, *_: Workload((feedback.target,), feedback.rounding.fmt))
def feed_back_block(feedback: Feedback, adjusted: Tensor, columns: slice) -> None:
    """Quantize a block of columns, which comes adjusted to all before it."""
    target, factor, rounding, result, errors = feedback
    # One column after the other: they are to lie together. Both are written to, and contiguous()
    # would be a view of a target with one row or column.
    left = adjusted.T.contiguous()
    wanted = target[:, columns].T.clone(memory_format=torch.contiguous_format)
    groups, within = rounding.groups[columns].tolist(), factor[columns, columns]
    for i, group in enumerate(groups):
        left[i] = _rounded(left[i], rounding, group)
        wanted[i] -= left[i]
        left[i + 1 :].addr_(within[i, i + 1 :], wanted[i])
    result[:, columns], errors[:, columns] = left.T, wanted.T


@operation(lambda descent, *_: Workload((descent.target,), descent.rounding.fmt))
def descend_in_place(descent: Descent, sweeps: int) -> int:
    """Change values, and pulls where they are given, in place. Return how many changes there were.

    A row in which a sweep changed nothing is done with.
    """
    values, target, hessian, rounding, block, pulls = descent
    total, groups = 0, rounding.groups.tolist()
    rows = torch.arange(len(values), device=values.device)
    for _ in range(sweeps):
        # One column after the other: they are to lie together.
        now, wanted = values[rows].T.contiguous(), target[rows].T.contiguous()
        for columns in _blocks(target, block):
            pull = hessian[columns] @ (now - wanted)
            for i, j in enumerate(range(columns.start, columns.stop)):
                curvature = hessian[j, j]
                if not float(curvature) > 0:
                    continue
                best = _rounded(now[j] - pull[i] / curvature, rounding, groups[j], rows)
                step = best - now[j]
                least = LEAST_GAIN * step * step * curvature
                # Twice the pull is the slope of the error.
                gains = step * (step * curvature + 2 * pull[i]) < -least
                best = torch.where(gains, best, now[j])
                pull.addr_(hessian[j, columns], best - now[j])
                now[j] = best
        changed = values[rows] != now.T
        values[rows] = now.T
        total += int(changed.sum())
        rows = rows[changed.any(1)]
        if not len(rows):
            break
    if pulls is not None:
        torch.mm(values - target, hessian, out=pulls)
    return total


def choose_candidates(
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
    grid, scales, _ = _in_units(grid, scales)
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
    for these in runs(len(grid), each=grid[0].numel() * count):
        whole = grid[these].unsqueeze(2).expand(-1, -1, count, -1, -1)
        if hessian.shape[-1] > grid.shape[-1]:
            candidates = _differences(whole.float(), scales[these], zeros[these], args)
            chosen[these] = _take_turns(candidates, hessian)
            continue
        errors = torch.zeros(scales[these].shape, dtype=torch.float64, device=grid.device)
        for rows in runs(whole.shape[-2], each=whole[..., :1, :].numel()):
            x = whole[..., rows, :].float()
            errors += _forms(_differences(x, scales[these], zeros[these], args), hessian)
        chosen[these] = errors.argmin(-1)
    return chosen


def _in_units(grid: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Divide rows of pieces and their scales, returned in float32, by a power of two for each row.

    It is near the largest value, so that squares of errors stay within float32. Dividing by it is
    exact; where no row needs it, the last result is None.

    :param grid: (grid rows, grid columns, rows, columns)
    :param scales: (grid rows, grid columns, candidates)
    """
    low, high = extrema(grid[None])[:2]
    _, exponents = torch.frexp(torch.maximum(-low, high).amax(1).double())
    if bool((exponents.abs() <= _SAFE_EXPONENT).all()):
        return grid, scales.float(), None
    units = torch.ldexp(torch.ones_like(exponents, dtype=torch.float64), exponents - 1)
    working = torch.promote_types(grid.dtype, torch.float32)
    grid = grid / units.to(working)[:, None, None, None]
    return grid, (scales / units[:, None, None]).float(), units


def _differences(x: Tensor, scales: Tensor, zeros: Tensor, args: QuantizationArgs) -> Tensor:
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


def _take_turns(candidates: Tensor, hessian: Tensor) -> Tensor:
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


def quadratic_error(
    pieces: Tensor, scales: Tensor, zeros: Tensor, hessian: Tensor, args: QuantizationArgs
) -> float:
    """Return Σ Δᵀ H Δ over all rows."""
    grid = as_grid(pieces, ordered=True)[0]
    hessian = hessian.to(grid.device, torch.float32)
    grid, scales, units = _in_units(grid, scales.reshape(*grid.shape[:2], 1))
    scales, zeros = scales.squeeze(-1), zeros.reshape(grid.shape[:2]).float()
    total = 0.0
    for these in runs(len(grid), each=grid[0].numel()):
        for rows in runs(grid.shape[-2], each=grid[these, :, :1].numel()):
            x = grid[these, :, rows]
            errors = _differences(x.float(), scales[these], zeros[these], args)
            errors = errors.transpose(1, 2).flatten(0, 1)
            blocks = errors.reshape(len(errors), len(hessian), -1).transpose(0, 1)
            forms = torch.bmm(blocks, hessian) * blocks
            if units is not None:
                of_rows = forms.sum((0, 2), dtype=torch.float64).clamp_(min=0)
                forms = of_rows * units[these].square().repeat_interleave(x.shape[2])
            total += float(forms.sum(dtype=torch.float64))
    return total
