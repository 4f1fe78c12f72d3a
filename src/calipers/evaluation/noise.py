"""How far figures move when nothing but the rounding changes.

A model computes in numbers of few digits, and where it is badly damaged, or rounds its activations
to a coarse grid, one rounding that falls otherwise becomes another prediction further on. Some
samples run again with every value that enters the model or one of its linear layers moved by one
rounding, up or down at random. What that does to the perplexity is no property of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

FACTOR = 3
"""How many standard deviations of the noise a difference must exceed."""

SHARE = 8
FEWEST = 16
"""One sample of so many runs again, but so many at least."""

_STANDS_OUT = 2
"""How many standard deviations a shift of the mean must have to be one."""

_SUM = 2.0**-18
"""What a sum over a thousand products may lose in float32, relative to it: √1000 roundings."""


@contextmanager
def rounded_otherwise(model: nn.Module, seed: int) -> Iterator[None]:
    """Move what enters a model and its linear layers by one rounding while this is open."""
    generator = torch.Generator().manual_seed(seed)

    def move(values: Tensor) -> Tensor:
        if not values.is_floating_point():
            return values
        step = max(torch.finfo(values.dtype).eps / 2, _SUM)
        up = torch.randint(2, values.shape, generator=generator, dtype=torch.int8)
        factor = 1 + step * (2 * up.to(values.device, torch.float32) - 1)
        return (values * factor).to(values.dtype)

    def move_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (move(args[0]), *args[1:]) if args else args

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                handle = module.register_forward_pre_hook(move_input)
                stack.callback(handle.remove)
            elif isinstance(module, nn.Embedding):
                handle = module.register_forward_hook(lambda _, __, output: move(output))
                stack.callback(handle.remove)
        yield


def noise_in_nats(change: Tensor, tokens: Tensor, samples: int) -> float:
    """Return the standard deviation of the mean of −log q per token over all samples.

    It has two parts: how far the mean is shifted, where that stands out, and what is left of the
    noise of single samples, which is independent from one to the next.

    :param change: (some samples,) the sums over tokens with other roundings, less those without
    :param tokens: (some samples,) how many tokens each predicts
    :param samples: of how many samples the mean is
    :return: Inf where the model computes NaN or Inf with other roundings
    """
    count, total = len(change), tokens.sum()
    shift = change.sum() / total
    if count < 2:
        return abs(float(shift))
    rest = change - shift * tokens
    variance = rest.square().sum() / total**2 * count / (count - 1)
    shifted = shift.square() if shift.square() > _STANDS_OUT**2 * variance else 0.0
    found = math.sqrt(float(shifted + variance * count / samples))
    return found if math.isfinite(found) else math.inf


def batches_to_repeat(sizes: list[int]) -> list[int]:
    """Choose batches, by the number of samples in each, from everywhere among them.

    >>> batches_to_repeat([8] * 40)
    [0, 8, 16, 24, 32]
    """
    wanted = min(sum(sizes), max(FEWEST, math.ceil(sum(sizes) / SHARE)))
    count = math.ceil(wanted / max(sizes))
    return [index * len(sizes) // count for index in range(count)]
