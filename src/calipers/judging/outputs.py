"""What the output of a module loses by its weight and by its static input."""

from __future__ import annotations

import torch
from torch import Tensor

from calipers.judging.costs import ActivationCost, ModuleCosts
from calipers.judging.errors import relative_error
from calipers.judging.streams import Streams
from calipers.judging.weights import WeightLoss
from calipers.kernels.reductions import sum_of_squares


def module_costs(
    weight: Tensor,
    loss: WeightLoss,
    streams: Streams | None,
    tensors: dict[str, ActivationCost],
) -> ModuleCosts:
    """Return what the output of a module loses by its weight, and by its static input."""
    if streams is None or loss.output is None:
        return ModuleCosts(tensors=tensors, loss=loss.loss)
    by_weight = relative_error(loss.output, streams.output)
    seen = tensors.get("input")
    if seen is None:
        return ModuleCosts(by_weight, tensors=tensors, loss=loss.loss)
    columns = sum_of_squares(weight.detach()).cpu()
    return ModuleCosts(by_weight, *_input_errors(seen, streams, columns), tensors, loss.loss)


def _input_errors(
    seen: ActivationCost, streams: Streams, columns: Tensor
) -> tuple[float, float | None]:
    """Return the error of the output by that of the input: of all values, and of typical ones.

    :param columns: Σw² of each column of the weight
    """
    x = streams.energies
    total = float(x.sum())
    alone = float((columns * x).sum())  # E‖y‖² if channels were independent of each other
    if not alone:
        return 0.0, 0.0
    gain = streams.output / alone
    error = seen.error**2 * total
    in_largest = _concentrated(error * seen.error_in_largest, x)
    elsewhere = error * (1 - seen.error_in_largest)
    lost = in_largest + _spread(elsewhere, x - in_largest)
    whole = relative_error(_passed_on(lost, x, columns, gain), streams.output)
    if not seen.typical_error:
        return whole, 0.0
    usual = x - _concentrated(total - elsewhere / seen.typical_error**2, x)
    lost = _spread(elsewhere, usual)
    return whole, relative_error(
        _passed_on(lost, usual, columns, gain), gain * float((columns * usual).sum())
    )


def _passed_on(lost: Tensor, x: Tensor, columns: Tensor, gain: float) -> float:
    """Return the energy at the output of what channels of energy ``x`` lose.

    The best that a coarse grid can keep of a channel is (1−f)·x, f the share that is lost: f² of
    its energy is then missing, and goes together with other channels as the signal does; the rest,
    f·(1−f), is noise.
    """
    share = torch.where(x > 0, lost / x, 0.0).clamp(0, 1)
    return float((columns * x * (share * (1 - share) + share.square() * gain)).sum())


def _concentrated(total: float, most: Tensor) -> Tensor:
    """Let the largest take as much as they can, until nothing is left.

    >>> _concentrated(5.0, torch.tensor([1.0, 4.0, 2.0])).tolist()
    [0.0, 4.0, 1.0]
    """
    ordered, order = most.sort(descending=True)
    left = total - (ordered.cumsum(0) - ordered)
    return torch.empty_like(most).scatter_(0, order, left.clamp(min=0).minimum(ordered))


def _spread(total: float, most: Tensor) -> Tensor:
    """Spread a sum evenly; nobody takes more than its most.

    >>> _spread(5.0, torch.tensor([1.0, 10.0, 10.0])).tolist()
    [1.0, 2.0, 2.0]
    """
    ordered = most.sort().values
    taken = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)[:-1]])
    levels = (total - taken) / torch.arange(len(ordered), 0, -1, device=most.device)
    enough = levels <= ordered
    return most.clamp(max=float(levels[enough][0])) if bool(enough.any()) else most
